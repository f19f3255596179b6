// The only file that knows Python. Converts arguments and errors, releases the GIL, adds no behaviour.
//
// Writable from Python: the bytes of AddressRange.buffer() where something writable is mapped. Nothing else.
// Arguments are validated by the core; here only what has no C++ type yet (names of modes, lengths of bytes).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "lease/reader.h"
#include "lease/table.h"
#include "memory/address_range.h"
#include "memory/errors.h"
#include "memory/page.h"
#include "memory/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;
using mc2::lease::ClaimResult;
using mc2::lease::LeaseReader;
using mc2::lease::LeaseTable;

void translate_system_error(const std::exception_ptr& pointer, void* /*payload*/) {
    try {
        std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
        const nb::tuple arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

template <typename Class>
void add_context_manager(nb::class_<Class>& type) {
    type.def("__enter__", [](const nb::object& self) { return self; });
    type.def("__exit__", [](const nb::object& self, const nb::args&) { self.attr("close")(); });
}

mc2::HugePages huge_pages_of(const std::string& name) {
    if (name == "auto") {
        return mc2::HugePages::kAuto;
    }
    if (name == "off") {
        return mc2::HugePages::kOff;
    }
    if (name == "require") {
        return mc2::HugePages::kRequire;
    }
    mc2::throw_invalid("huge_pages is \"" + name + "\", must be auto, off or require");
}

const char* name_of(mc2::HugePageMethod method) {
    switch (method) {
        case mc2::HugePageMethod::kHugetlb:
            return "hugetlb";
        case mc2::HugePageMethod::kThp:
            return "thp";
        case mc2::HugePageMethod::kCollapse:
            return "collapse";
        case mc2::HugePageMethod::kNone:
            break;
    }
    return "none";
}

const char* name_of(mc2::PartKind kind) {
    switch (kind) {
        case mc2::PartKind::kPool:
            return "pool";
        case mc2::PartKind::kPeer:
            return "peer";
        case mc2::PartKind::kAnonymous:
            break;
    }
    return "anonymous";
}

const char* name_of(ClaimResult result) {
    switch (result) {
        case ClaimResult::kHeld:
            return "held";
        case ClaimResult::kPending:
            return "pending";
        case ClaimResult::kDead:
            break;
    }
    return "dead";
}

const char* name_of(mc2::lease::Verdict reason) {
    switch (reason) {
        case mc2::lease::Verdict::kReleased:
            return "released";
        case mc2::lease::Verdict::kPeerGone:
            return "peer_gone";
        case mc2::lease::Verdict::kExpired:
        case mc2::lease::Verdict::kKeep:
            break;
    }
    return "expired";
}

void bind_pool(const nb::module_& module) {
    nb::class_<mc2::Pool> type(module, "Pool");
    type.def(
            "__init__",
            [](mc2::Pool* self, std::size_t num_bytes, const std::string& huge_pages,
               const std::string& name) {
                const mc2::HugePages mode = huge_pages_of(huge_pages);
                const nb::gil_scoped_release no_gil;
                new (self) mc2::Pool(num_bytes, mode, name);
            },
            "num_bytes"_a, nb::kw_only(), "huge_pages"_a = "auto", "name"_a = "mc2-pool")
        .def_prop_ro("num_bytes", &mc2::Pool::num_bytes)
        .def_prop_ro("fd", &mc2::Pool::exported_fd)
        .def_prop_ro("page_bytes", &mc2::Pool::page_bytes)
        .def_prop_ro("huge_bytes", &mc2::Pool::huge_bytes)
        .def_prop_ro("method", [](const mc2::Pool& self) { return name_of(self.method()); })
        .def_prop_ro("sealed", &mc2::Pool::sealed)
        .def("seal", &mc2::Pool::seal)
        .def("close", &mc2::Pool::close, NoGil());
    add_context_manager(type);
}

// Shares the range with the buffers made from it, so that a tensor keeps its memory whatever happens to the owner.
class SharedRange {
 public:
    explicit SharedRange(std::size_t num_bytes)
        : range_(std::make_shared<mc2::AddressRange>(num_bytes)) {}

    mc2::AddressRange& operator*() const { return *range_; }
    mc2::AddressRange* operator->() const { return range_.get(); }

    [[nodiscard]] nb::object buffer() const {
        if (range_->address() == nullptr) {
            mc2::throw_invalid("address range is closed");
        }
        auto keep_alive = std::make_unique<std::shared_ptr<mc2::AddressRange>>(range_);
        const nb::capsule owner(keep_alive.get(), [](void* pointer) noexcept {
            const std::unique_ptr<std::shared_ptr<mc2::AddressRange>> last(
                static_cast<std::shared_ptr<mc2::AddressRange>*>(pointer));
        });
        (void)keep_alive.release();
        using Bytes = nb::ndarray<nb::memview, std::int8_t, nb::ndim<1>, nb::c_contig>;
        return nb::cast(Bytes(range_->address(), {range_->num_bytes()}, owner));
    }

    // Views are made and dropped with the GIL held, as this runs, so the count is exact.
    void close() const {
        if (range_.use_count() > 1) {
            mc2::throw_invalid("address range cannot be closed: " +
                               std::to_string(range_.use_count() - 1) + " views are alive");
        }
        range_->close();
    }

 private:
    std::shared_ptr<mc2::AddressRange> range_;
};

void bind_address_range(const nb::module_& module) {
    using CopyTuple = std::tuple<std::size_t, std::size_t, std::size_t>;
    nb::class_<SharedRange> type(module, "AddressRange");
    type.def(nb::init<std::size_t>(), "num_bytes"_a)
        .def_prop_ro("address",
                     [](const SharedRange& self) {
                         return reinterpret_cast<std::uintptr_t>(self->address());
                     })
        .def_prop_ro("num_bytes", [](const SharedRange& self) { return self->num_bytes(); })
        .def(
            "map_pool",
            [](const SharedRange& self, std::size_t offset, const mc2::Pool& pool,
               std::size_t pool_offset,
               std::size_t num_bytes) { self->map_pool(offset, pool, pool_offset, num_bytes); },
            NoGil(), "offset"_a, "pool"_a, "pool_offset"_a, "num_bytes"_a)
        .def(
            "map_anonymous",
            [](const SharedRange& self, std::size_t offset, std::size_t num_bytes) {
                self->map_anonymous(offset, num_bytes);
            },
            NoGil(), "offset"_a, "num_bytes"_a)
        .def(
            "map_peer",
            [](const SharedRange& self, std::size_t offset, int fd, std::size_t fd_offset,
               std::size_t num_bytes) { self->map_peer(offset, fd, fd_offset, num_bytes); },
            NoGil(), "offset"_a, "fd"_a, "fd_offset"_a, "num_bytes"_a)
        .def(
            "unmap",
            [](const SharedRange& self, std::size_t offset, std::size_t num_bytes) {
                self->unmap(offset, num_bytes);
            },
            NoGil(), "offset"_a, "num_bytes"_a)
        .def(
            "prefault",
            [](const SharedRange& self, std::size_t offset, std::size_t num_bytes) {
                self->prefault(offset, num_bytes);
            },
            NoGil(), "offset"_a, "num_bytes"_a)
        .def(
            "copy",
            [](const SharedRange& self, const std::vector<CopyTuple>& tuples) {
                std::vector<mc2::Copy> copies;
                copies.reserve(tuples.size());
                for (const auto& [dst_offset, src_offset, num_bytes] : tuples) {
                    copies.push_back({.dst_offset = dst_offset,
                                      .src_offset = src_offset,
                                      .num_bytes = num_bytes});
                }
                self->copy(copies);
            },
            NoGil(), "copies"_a)
        .def("buffer", &SharedRange::buffer)
        .def("mappings",
             [](const SharedRange& self) {
                 nb::list rows;
                 for (const mc2::Part& part : self->mappings()) {
                     rows.append(nb::make_tuple(part.offset, part.num_bytes, name_of(part.kind)));
                 }
                 return rows;
             })
        .def("close", &SharedRange::close);
    add_context_manager(type);
}

template <typename Array>
Array array_of(const char* name, const nb::bytes& bytes) {
    Array array{};
    if (bytes.size() != array.size()) {
        mc2::throw_invalid(std::string(name) + " has " + std::to_string(bytes.size()) +
                           " bytes, must have " + std::to_string(array.size()));
    }
    std::memcpy(array.data(), bytes.c_str(), array.size());
    return array;
}

template <typename Array>
nb::bytes bytes_of(const Array& array) {
    return nb::bytes(reinterpret_cast<const char*>(array.data()), array.size());
}

constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 32U;
using PublishedId = std::optional<std::pair<std::uint32_t, std::uint32_t>>;

PublishedId publish(LeaseTable& self, const nb::bytes& token, const nb::bytes& digest,
                    std::uint64_t num_tokens, std::span<const std::uint32_t> block_ids,
                    double timeout_seconds, std::uint64_t num_pool_blocks) {
    const auto id = self.publish({.token = array_of<mc2::lease::Token>("token", token),
                                  .digest = array_of<mc2::lease::Digest>("digest", digest),
                                  .num_tokens = num_tokens,
                                  .block_ids = block_ids,
                                  .timeout = std::chrono::duration<double>(timeout_seconds),
                                  .num_pool_blocks = num_pool_blocks});
    if (!id) {
        return std::nullopt;
    }
    return std::make_pair(id->slot, id->generation);
}

// An int32 buffer, as block tables are: no Python object per block. A negative id is a huge unsigned one, and refused.
PublishedId publish_buffer(
    LeaseTable& self, const nb::bytes& token, const nb::bytes& digest, std::uint64_t num_tokens,
    const nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& block_ids,
    double timeout_seconds, std::uint64_t num_pool_blocks) {
    const auto* first = reinterpret_cast<const std::uint32_t*>(block_ids.data());
    return publish(self, token, digest, num_tokens, {first, block_ids.size()}, timeout_seconds,
                   num_pool_blocks);
}

// Where the ids lie, for tensors: torch has no buffer protocol, and DLPack costs more than all the rest of a hand-over.
struct IdSpan {
    std::uintptr_t address;
    std::size_t num_ids;
    nb::object owner;  // keeps the memory
};

PublishedId publish_span(LeaseTable& self, const nb::bytes& token, const nb::bytes& digest,
                         std::uint64_t num_tokens, const IdSpan& block_ids, double timeout_seconds,
                         std::uint64_t num_pool_blocks) {
    // An address from Python is a number. NOLINTNEXTLINE(performance-no-int-to-ptr)
    const auto* first = reinterpret_cast<const std::uint32_t*>(block_ids.address);
    return publish(self, token, digest, num_tokens, {first, block_ids.num_ids}, timeout_seconds,
                   num_pool_blocks);
}

PublishedId publish_list(LeaseTable& self, const nb::bytes& token, const nb::bytes& digest,
                         std::uint64_t num_tokens, const std::vector<std::uint32_t>& block_ids,
                         double timeout_seconds, std::uint64_t num_pool_blocks) {
    return publish(self, token, digest, num_tokens, block_ids, timeout_seconds, num_pool_blocks);
}

nb::tuple view(const LeaseTable& self, std::size_t max_rows) {
    mc2::lease::TableView view;
    {
        const nb::gil_scoped_release
            no_gil;  // the scheduler's thread must not wait for an onlooker
        view = self.view(max_rows);
    }
    nb::list rows;
    for (const auto& row : view.rows) {
        nb::list holders;
        for (const auto& holder : row.holders) {
            holders.append(nb::make_tuple(holder.ledger_id, holder.claims, holder.releases));
        }
        const bool held = row.state == mc2::lease::SlotState::kHeld;
        const bool goes_on = row.verdict == mc2::lease::Verdict::kKeep;
        rows.append(nb::make_tuple(row.id.slot, row.id.generation,
                                   goes_on ? (held ? "held" : "offered") : name_of(row.verdict),
                                   row.num_tokens, row.num_blocks, row.claims, row.releases,
                                   row.age.count(), holders));
    }
    return nb::make_tuple(view.num_leases, rows);
}

nb::list sweep(LeaseTable& self) {
    nb::list ended;
    for (const auto& lease : self.sweep()) {
        ended.append(nb::make_tuple(lease.id.slot, lease.id.generation, name_of(lease.reason)));
    }
    return ended;
}

void bind_lease_table(const nb::module_& module) {
    nb::class_<IdSpan>(module, "IdSpan")
        .def(
            "__init__",
            [](IdSpan* self, std::uintptr_t address, std::size_t num_ids, nb::object owner) {
                new (self)
                    IdSpan{.address = address, .num_ids = num_ids, .owner = std::move(owner)};
            },
            "address"_a, "num_ids"_a, "owner"_a);
    nb::class_<LeaseTable> type(module, "LeaseTable");
    type.def(nb::init<std::size_t, std::size_t>(), NoGil(), "num_slots"_a, "max_blocks"_a)
        .def_prop_ro("fd", &LeaseTable::fd)
        .def_prop_ro("num_slots", &LeaseTable::num_slots)
        .def_prop_ro("max_blocks", &LeaseTable::max_blocks)
        .def_prop_ro("num_active", &LeaseTable::num_active)
        .def("publish", &publish_span, "token"_a, "digest"_a, "num_tokens"_a, "block_ids"_a,
             "timeout_seconds"_a, "num_pool_blocks"_a = kNoLimit)
        .def("publish", &publish_buffer, "token"_a, "digest"_a, "num_tokens"_a, "block_ids"_a,
             "timeout_seconds"_a, "num_pool_blocks"_a = kNoLimit)
        .def("publish", &publish_list, "token"_a, "digest"_a, "num_tokens"_a, "block_ids"_a,
             "timeout_seconds"_a, "num_pool_blocks"_a = kNoLimit)
        .def(
            "add_ledger",
            [](LeaseTable& self) {
                const auto handle = self.add_ledger();
                return std::make_pair(handle.id, handle.fd);
            },
            NoGil())
        .def("drop_ledger", &LeaseTable::drop_ledger, NoGil(), "ledger_id"_a)
        .def("sweep", &sweep)
        .def("view", &view, "max_rows"_a)
        .def("close", &LeaseTable::close, NoGil());
    add_context_manager(type);
}

// The vector's memory goes to Python as it is.
nb::object to_memoryview(std::vector<std::int32_t>&& ids) {
    auto kept = std::make_unique<std::vector<std::int32_t>>(std::move(ids));
    const nb::capsule owner(kept.get(), [](void* pointer) noexcept {
        const std::unique_ptr<std::vector<std::int32_t>> last(
            static_cast<std::vector<std::int32_t>*>(pointer));
    });
    auto* const vector = kept.release();
    using Ids = nb::ndarray<nb::memview, std::int32_t, nb::ndim<1>, nb::c_contig>;
    return nb::cast(Ids(vector->data(), {vector->size()}, owner));
}

// Token comparison that takes as long for a near miss as for a hit.
bool is_same(const mc2::lease::Token& one, const mc2::lease::Token& other) {
    std::byte difference{};
    for (std::size_t i = 0; i < one.size(); ++i) {
        difference |= one[i] ^ other[i];
    }
    return difference == std::byte{};
}

using SlotArgument =
    std::uint64_t;  // wider than the words: what no slot can be is refused by the core

void bind_lease_reader(const nb::module_& module) {
    nb::class_<LeaseReader> type(module, "LeaseReader");
    type.def(nb::init<int, int>(), NoGil(), "index_fd"_a, "ledger_fd"_a)
        .def_prop_ro("num_slots", &LeaseReader::num_slots)
        .def_prop_ro("max_blocks", &LeaseReader::max_blocks)
        .def(
            "peek",
            [](LeaseReader& self, SlotArgument slot, SlotArgument generation) -> nb::object {
                const auto info = self.claimant().peek(slot, generation);
                if (!info) {
                    return nb::none();
                }
                return nb::make_tuple(bytes_of(info->token), bytes_of(info->digest),
                                      info->num_tokens, info->num_blocks);
            },
            "slot"_a, "generation"_a)
        .def(
            "claim",
            [](LeaseReader& self, SlotArgument slot, SlotArgument generation) {
                return name_of(self.claimant().claim(slot, generation));
            },
            "slot"_a, "generation"_a)
        .def(
            "poll",
            [](LeaseReader& self, SlotArgument slot, SlotArgument generation) {
                return name_of(self.claimant().poll(slot, generation));
            },
            "slot"_a, "generation"_a)
        .def(
            "blocks",
            [](LeaseReader& self, SlotArgument slot, SlotArgument generation) {
                return self.claimant().blocks(slot, generation);
            },
            "slot"_a, "generation"_a)
        .def(
            "block_table",
            [](LeaseReader& self, SlotArgument slot, SlotArgument generation, std::uint32_t base,
               std::uint32_t num_blocks) {
                return to_memoryview(
                    self.claimant().block_table(slot, generation, base, num_blocks));
            },
            "slot"_a, "generation"_a, "base"_a, "num_blocks"_a)
        .def(
            "take",
            [](LeaseReader& self, SlotArgument slot, SlotArgument generation,
               const nb::bytes& token) -> nb::object {
                const auto info = self.claimant().peek(slot, generation);
                if (!info || !is_same(info->token, array_of<mc2::lease::Token>("token", token))) {
                    return nb::none();
                }
                const ClaimResult result = self.claimant().claim(slot, generation);
                return nb::make_tuple(name_of(result), info->num_tokens);
            },
            "slot"_a, "generation"_a, "token"_a)
        .def(
            "release",
            [](LeaseReader& self, SlotArgument slot, SlotArgument generation) {
                self.claimant().release(slot, generation);
            },
            "slot"_a, "generation"_a)
        .def("close", &LeaseReader::close, NoGil());
    add_context_manager(type);
}

}  // namespace

NB_MODULE(_native, module) {  // NOLINT(performance-unnecessary-value-param): the macro says how
    nb::register_exception_translator(translate_system_error);
    // vLLM's processes end with our objects alive, by design: its tensors point into them. That is no leak to report.
    nb::set_leak_warnings(false);
    module.attr("HUGE_PAGE_BYTES") = mc2::kHugePageBytes;
    bind_pool(module);
    bind_address_range(module);
    bind_lease_table(module);
    bind_lease_reader(module);
}
