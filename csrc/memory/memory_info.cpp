#include "memory/memory_info.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "memory/page.h"

namespace mc2 {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

std::optional<std::size_t> parse_number(std::string_view text, int base = 10) {
    std::size_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (error != std::errc() || end == text.data()) {
        return std::nullopt;
    }
    return value;
}

// The number after `key` at the start of a line, as in /proc/meminfo and memory.stat.
std::optional<std::size_t> field(const std::string& file, std::string_view key) {
    std::ifstream stream(file);
    std::string line;
    while (std::getline(stream, line)) {
        if (line.starts_with(key)) {
            const auto start = line.find_first_not_of(" \t", key.size());
            return start == std::string::npos ? std::nullopt : parse_number(line.substr(start));
        }
    }
    return std::nullopt;
}

std::size_t meminfo(std::string_view key) { return field("/proc/meminfo", key).value_or(0); }

struct CgroupFiles {
    const char* root;
    const char* limit;
    const char* usage;
    const char* reclaimable_key;
};
constexpr CgroupFiles kCgroupV2{.root = "/sys/fs/cgroup",
                                .limit = "memory.max",
                                .usage = "memory.current",
                                .reclaimable_key = "inactive_file "};
constexpr CgroupFiles kCgroupV1{.root = "/sys/fs/cgroup/memory",
                                .limit = "memory.limit_in_bytes",
                                .usage = "memory.usage_in_bytes",
                                .reclaimable_key = "total_inactive_file "};

std::size_t headroom_of_group(const std::string& group, const CgroupFiles& files) {
    const auto limit = field(group + "/" + files.limit, "");  // "max" is no number: unlimited
    const auto usage = field(group + "/" + files.usage, "");
    if (!limit || !usage) {
        return kUnlimited;
    }
    // The page cache counts as usage, but the kernel gives inactive file pages up before it refuses.
    const auto reclaimable = field(group + "/memory.stat", files.reclaimable_key).value_or(0);
    const auto used = *usage - std::min(*usage, reclaimable);
    return *limit - std::min(*limit, used);
}

// Every ancestor limits too. In a container the path may be the host's and name nothing here; then only the
// mount's root, which is the container's own group, is found.
std::size_t headroom(const std::string& path, const CgroupFiles& files) {
    const std::string root(files.root);
    // Strings, since a manylinux_2_28 image's libstdc++ has no std::filesystem to link with.
    std::string group = root + "/" + path;
    std::size_t result = headroom_of_group(root, files);
    while (group.size() > root.size()) {
        result = std::min(result, headroom_of_group(group, files));
        group.resize(group.rfind('/'));  // the one after the root at the latest
    }
    return result;
}

std::size_t cgroup_headroom() {
    std::ifstream stream("/proc/self/cgroup");
    std::string line;
    std::size_t result = kUnlimited;
    while (std::getline(stream, line)) {  // "0::/path" (v2) or "4:memory,other:/path" (v1)
        const auto first = line.find(':');
        const auto second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const std::string path = line.substr(second + 1);
        if (controllers == ",,") {
            result = std::min(result, headroom(path, kCgroupV2));
        } else if (controllers.find(",memory,") != std::string::npos) {
            result = std::min(result, headroom(path, kCgroupV1));
        }
    }
    return result;
}

std::string first_line(const char* path) {
    std::ifstream stream(path);
    std::string line;
    std::getline(stream, line);
    return line;
}

constexpr std::size_t kKib = 1024;

}  // namespace

std::size_t available_bytes() {
    return std::min(meminfo("MemAvailable:") * kKib, cgroup_headroom());
}

std::size_t free_hugetlb_bytes() {
    if (meminfo("Hugepagesize:") * kKib != kHugePageBytes) {
        return 0;
    }
    const std::size_t free = meminfo("HugePages_Free:");
    return (free - std::min(free, meminfo("HugePages_Rsvd:"))) * kHugePageBytes;
}

bool shmem_thp_allowed() {
    const std::string system = first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    const std::string own =
        first_line("/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled");
    if (system.empty() || system.find("[deny]") != std::string::npos) {
        return false;
    }
    // Kernels since 6.11 have a switch per size, which counts unless it inherits the general one.
    const bool inherits = own.empty() || own.find("[inherit]") != std::string::npos;
    return (inherits ? system : own).find("[never]") == std::string::npos;
}

std::size_t huge_mapped_bytes(const void* address, std::size_t num_bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    std::ifstream stream("/proc/self/smaps");
    std::string line;
    std::size_t total = 0;
    bool inside = false;
    while (std::getline(stream, line)) {
        // A mapping starts with "7f12...-7f34... rw-s ...", its counters with "Name:  123 kB".
        const auto dash = line.find('-');
        const auto colon = line.find(':');
        if (dash != std::string::npos && (colon == std::string::npos || dash < colon)) {
            const auto start = parse_number(std::string_view(line).substr(0, dash), 16);
            inside = start && *start >= begin && *start - begin < num_bytes;
        } else if (inside && (line.starts_with("ShmemPmdMapped:"))) {
            const auto digits = line.find_first_of("0123456789");
            total += parse_number(std::string_view(line).substr(digits)).value_or(0) * kKib;
        }
    }
    return total;
}

}  // namespace mc2
