// Two processes with simulated devices: the one that tests, and a forked one that exports.
#pragma once

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ascend/acl_library.h"
#include "ascend/device_copy.h"
#include "ascend/device_export.h"
#include "ascend/device_import.h"
#include "ascend/owners.h"
#include "ascend/segment.h"
#include "check.h"
#include "memory/page.h"

namespace mc2::test {

using ascend::AclPointer;
using ascend::Segment;

inline constexpr std::size_t kKeyBytes = 2 * kHugePageBytes;
// What the exporter's reservation consists of.
inline constexpr std::array<std::size_t, 3> kBlockBytes = {kHugePageBytes, 2 * kHugePageBytes,
                                                           kHugePageBytes};
inline constexpr std::size_t kPoolBytes = 4 * kHugePageBytes;

inline std::string simulator_path() {
    const char* path = std::getenv("MC2_ACL_SIM_LIBRARY");  // NOLINT(concurrency-mt-unsafe)
    if (path == nullptr) {
        throw std::runtime_error("MC2_ACL_SIM_LIBRARY is not set; run this test with ctest");
    }
    return path;
}

// What the simulator has beyond what we call in production.
class Simulator {
 public:
    Simulator() : library_(::dlopen(simulator_path().c_str(), RTLD_NOW | RTLD_LOCAL)) {}

    void fail(const char* call, int skip, int code, int times) const {
        symbol<void(const char*, int, int, int)>("mc2_sim_fail")(call, skip, code, times);
    }
    void clear_faults() const { symbol<void()>("mc2_sim_clear_faults")(); }
    void set_copy_delay_us(std::int64_t delay) const {
        symbol<void(std::int64_t)>("mc2_sim_set_copy_delay_us")(delay);
    }
    [[nodiscard]] std::int64_t calls(const char* call) const {
        return symbol<std::int64_t(const char*)>("mc2_sim_calls")(call);
    }
    [[nodiscard]] std::int64_t violations() const {
        return symbol<std::int64_t()>("mc2_sim_violations")();
    }
    [[nodiscard]] std::map<std::string, std::int64_t> live() const {
        std::map<std::string, std::int64_t> counts;
        for (const char* what : {"reservations", "mappings", "malloc", "physical", "imports",
                                 "exports", "ipc_imports", "ipc_exports", "pending", "streams"}) {
            counts[what] = symbol<std::int64_t(const char*)>("mc2_sim_live")(what);
        }
        return counts;
    }

    [[nodiscard]] std::uintptr_t malloc(std::size_t num_bytes) const {
        void* pointer = nullptr;
        require(symbol<int(void**, std::size_t, int)>("aclrtMalloc")(&pointer, num_bytes, 0));
        return reinterpret_cast<std::uintptr_t>(pointer);
    }
    void free(std::uintptr_t address) const {
        require(symbol<int(void*)>("aclrtFree")(ascend::pointer_of(address)));
    }
    void write(std::uintptr_t address, const std::vector<std::uint8_t>& bytes) const {
        constexpr int kHostToDevice = 1;
        require(copy(ascend::pointer_of(address), bytes.data(), bytes.size(), kHostToDevice));
    }
    [[nodiscard]] std::vector<std::uint8_t> read(std::uintptr_t address,
                                                 std::size_t num_bytes) const {
        constexpr int kDeviceToHost = 2;
        std::vector<std::uint8_t> bytes(num_bytes);
        require(copy(bytes.data(), ascend::pointer_of(address), num_bytes, kDeviceToHost));
        return bytes;
    }

 private:
    template <typename Signature>
    [[nodiscard]] Signature* symbol(const char* name) const {
        void* found = ::dlsym(library_, name);
        if (found == nullptr) {
            throw std::runtime_error(std::string("the simulator has no ") + name);
        }
        return reinterpret_cast<Signature*>(found);
    }
    int copy(void* dst, const void* src, std::size_t num_bytes, int kind) const {
        return symbol<int(void*, std::size_t, const void*, std::size_t, int)>("aclrtMemcpy")(
            dst, num_bytes, src, num_bytes, kind);
    }
    static void require(int code) {
        if (code != 0) {
            throw std::runtime_error("the simulator answers " + std::to_string(code));
        }
    }

    void* library_;
};

// Own device memory, in blocks side by side.
class DevicePool {
 public:
    DevicePool(const AclPointer& acl, std::int32_t device)
        : reservation_(ascend::reserve(acl, kPoolBytes)) {
        std::uintptr_t at = address();
        for (const std::size_t num_bytes : kBlockBytes) {
            memory_.push_back(ascend::allocate(acl, device, num_bytes));
            mappings_.push_back(
                ascend::map(acl, ascend::pointer_of(at), num_bytes, memory_.back()));
            at += num_bytes;
        }
    }
    [[nodiscard]] std::uintptr_t address() const {
        return reinterpret_cast<std::uintptr_t>(reservation_.get());
    }

 private:
    // Destroyed from the last to the first.
    ascend::Reservation reservation_;
    std::vector<ascend::PhysicalHandle> memory_;
    std::vector<ascend::DeviceMapping> mappings_;
};

inline std::vector<std::uint8_t> pattern(std::size_t num_bytes, std::uint32_t seed) {
    std::vector<std::uint8_t> bytes(num_bytes);
    std::uint32_t state = seed;
    for (std::uint8_t& byte : bytes) {
        state = state * 1664525U + 1013904223U;
        byte = static_cast<std::uint8_t>(state >> 24U);
    }
    return bytes;
}

inline AclPointer load() {
    auto acl = std::make_shared<const ascend::Acl>(simulator_path());
    acl->initialize();
    return acl;
}

// The other process. It must be forked before this one has loaded the simulator, which belongs to one process.
class Exporter {
 public:
    Exporter() {
        std::array<int, 2> ends{};
        if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0) {
            throw std::runtime_error("socketpair");
        }
        child_ = ::fork();
        if (child_ == 0) {
            ::close(ends[0]);
            ::_exit(serve(ends[1]));
        }
        ::close(ends[1]);
        socket_ = ends[0];
        pool = receive_segment().base;
        for (std::size_t i = 0; i < kBlockBytes.size(); ++i) {
            segments.push_back(receive_segment());
        }
        segments.push_back(receive_segment());
    }
    Exporter(const Exporter&) = delete;
    Exporter& operator=(const Exporter&) = delete;
    Exporter(Exporter&&) = delete;
    Exporter& operator=(Exporter&&) = delete;
    ~Exporter() { ::close(socket_); }

    void admit(std::int32_t pid) const {
        send_all(socket_, &pid, sizeof(pid));
        char answer = 0;
        receive_all(socket_, &answer, sizeof(answer));
        CHECK_EQ(answer, 'y');
    }
    // True when it closed everything and nothing was left or wrong.
    bool finish() {
        ::shutdown(socket_, SHUT_WR);
        int status = 0;
        return ::waitpid(child_, &status, 0) == child_ && WIFEXITED(status) &&
               WEXITSTATUS(status) == 0;
    }

    std::uintptr_t pool = 0;
    std::vector<Segment> segments;  // the pool's, then the key

 private:
    static void send_all(int socket, const void* bytes, std::size_t num_bytes) {
        if (::send(socket, bytes, num_bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(num_bytes)) {
            throw std::runtime_error("the other process is gone");
        }
    }
    static void receive_all(int socket, void* bytes, std::size_t num_bytes) {
        if (::recv(socket, bytes, num_bytes, MSG_WAITALL) != static_cast<ssize_t>(num_bytes)) {
            throw std::runtime_error("the other process is gone");
        }
    }
    static void send_segment(int socket, const Segment& segment) {
        const std::array<std::uint64_t, 4> head = {static_cast<std::uint64_t>(segment.kind),
                                                   segment.base, segment.num_bytes,
                                                   segment.handle.size()};
        send_all(socket, head.data(), sizeof(head));
        send_all(socket, segment.handle.data(), segment.handle.size());
    }
    [[nodiscard]] Segment receive_segment() const {
        std::array<std::uint64_t, 4> head{};
        receive_all(socket_, head.data(), sizeof(head));
        Segment segment{.kind = static_cast<ascend::SegmentKind>(head[0]),
                        .base = head[1],
                        .num_bytes = head[2],
                        .handle = std::string(head[3], '\0')};
        receive_all(socket_, segment.handle.data(), segment.handle.size());
        return segment;
    }

    // In the child.
    static int serve(int socket) {
        try {
            const AclPointer acl = load();
            const Simulator simulator;
            acl->set_device(0);
            const auto before = simulator.live();
            {
                const DevicePool pool(acl, 0);
                const std::uintptr_t plain = simulator.malloc(kKeyBytes);
                simulator.write(pool.address(), pattern(kPoolBytes, 1));
                simulator.write(plain, pattern(kKeyBytes, 2));
                ascend::DeviceExport exported(acl, 0);
                send_segment(socket, {.kind = ascend::SegmentKind::kHandleV2,
                                      .base = pool.address(),
                                      .num_bytes = kPoolBytes,
                                      .handle = "-"});
                for (const Segment& segment :
                     exported.add_allocation(pool.address() + 4096, kPoolBytes - 8192, false)) {
                    send_segment(socket, segment);
                }
                send_segment(socket, exported.add_key(plain, kKeyBytes));
                for (std::int32_t pid = 0;
                     ::recv(socket, &pid, sizeof(pid), MSG_WAITALL) == sizeof(pid);) {
                    exported.admit(pid);
                    send_all(socket, "y", 1);
                }
                exported.close();
                simulator.free(plain);
            }
            return simulator.live() == before && simulator.violations() == 0 ? 0 : 1;
        } catch (const std::exception& error) {
            std::cerr << "exporter: " << error.what() << '\n';
            return 2;
        }
    }

    pid_t child_ = -1;
    int socket_ = -1;
};

inline constexpr std::int32_t kDevice = 1;

inline ascend::DeviceStrip strip_of(std::uintptr_t own, std::size_t own_stride, std::uintptr_t peer,
                                    std::size_t peer_stride, std::size_t num_bytes) {
    return {.own_address = own,
            .own_stride = own_stride,
            .peer_address = peer,
            .peer_stride = peer_stride,
            .num_bytes = num_bytes};
}

// Where the simulated processes meet; the other process inherits the variable.
inline std::string make_folder() {
    std::string name = "/tmp/mc2-ascend-test-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) {
        throw std::runtime_error("mkdtemp");
    }
    ::setenv("MC2_ACL_SIM_DIR", name.c_str(), 1);  // NOLINT(concurrency-mt-unsafe): no threads yet
    return name;
}

// The one exporter, then this process's simulator; in this order.
struct World {
    World() : acl(load()) {
        acl->set_device(kDevice);
        pool = std::make_unique<DevicePool>(acl, kDevice);
    }

    std::string folder = make_folder();
    Exporter exporter;
    AclPointer acl;
    Simulator simulator;
    std::unique_ptr<DevicePool> pool;
};

inline World& world() {
    static World all;
    return all;
}

inline ascend::DeviceImport import_pool() {
    const World& all = world();
    return {all.acl, kDevice, {all.exporter.segments.begin(), all.exporter.segments.end() - 1}};
}

// What is left of the two processes; to be called last.
inline void check_nothing_is_left() {
    World& all = world();
    CHECK_EQ(all.simulator.violations(), 0);
    CHECK(all.exporter.finish());
    all.pool.reset();
    for (const auto& [what, count] : all.simulator.live()) {
        if (count != 0) {
            fail(__FILE__, __LINE__, std::to_string(count) + " " + what);
        }
    }
    std::filesystem::remove_all(all.folder);
}

}  // namespace mc2::test
