// Lease tables and readers, as Python sees them.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "lease/reader.h"
#include "lease/table.h"
#include "memory/errors.h"

namespace mc2::bindings {
namespace {

using mc2::lease::ClaimResult;
using mc2::lease::LeaseReader;
using mc2::lease::LeaseTable;

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

const char* name_of(lease::Verdict reason) {
    switch (reason) {
        case lease::Verdict::kReleased:
            return "released";
        case lease::Verdict::kPeerGone:
            return "peer_gone";
        case lease::Verdict::kExpired:
        case lease::Verdict::kKeep:
            break;
    }
    return "expired";
}

template <typename Array>
Array array_of(const char* name, const nb::bytes& bytes) {
    Array array{};
    if (bytes.size() != array.size()) {
        throw_invalid(std::string(name) + " has " + std::to_string(bytes.size()) +
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
                    double timeout_seconds, std::uint64_t num_pool_blocks, bool is_copy_wanted) {
    const auto id = self.publish({.token = array_of<lease::Token>("token", token),
                                  .digest = array_of<lease::Digest>("digest", digest),
                                  .num_tokens = num_tokens,
                                  .block_ids = block_ids,
                                  .timeout = std::chrono::duration<double>(timeout_seconds),
                                  .num_pool_blocks = num_pool_blocks,
                                  .is_copy_wanted = is_copy_wanted});
    if (!id) {
        return std::nullopt;
    }
    return std::make_pair(id->slot, id->generation);
}

// An int32 buffer, as block tables are: no Python object per block. A negative id is a huge unsigned one, and refused.
PublishedId publish_buffer(
    LeaseTable& self, const nb::bytes& token, const nb::bytes& digest, std::uint64_t num_tokens,
    const nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& block_ids,
    double timeout_seconds, std::uint64_t num_pool_blocks, bool is_copy_wanted) {
    const auto* first = reinterpret_cast<const std::uint32_t*>(block_ids.data());
    return publish(self, token, digest, num_tokens, {first, block_ids.size()}, timeout_seconds,
                   num_pool_blocks, is_copy_wanted);
}

// Where the ids lie, for tensors: torch has no buffer protocol, and DLPack costs more than all the rest of a hand-over.
struct IdSpan {
    std::uintptr_t address;
    std::size_t num_ids;
    nb::object owner;  // keeps the memory
};

PublishedId publish_span(LeaseTable& self, const nb::bytes& token, const nb::bytes& digest,
                         std::uint64_t num_tokens, const IdSpan& block_ids, double timeout_seconds,
                         std::uint64_t num_pool_blocks, bool is_copy_wanted) {
    // An address from Python is a number. NOLINTNEXTLINE(performance-no-int-to-ptr)
    const auto* first = reinterpret_cast<const std::uint32_t*>(block_ids.address);
    return publish(self, token, digest, num_tokens, {first, block_ids.num_ids}, timeout_seconds,
                   num_pool_blocks, is_copy_wanted);
}

PublishedId publish_list(LeaseTable& self, const nb::bytes& token, const nb::bytes& digest,
                         std::uint64_t num_tokens, const std::vector<std::uint32_t>& block_ids,
                         double timeout_seconds, std::uint64_t num_pool_blocks,
                         bool is_copy_wanted) {
    return publish(self, token, digest, num_tokens, block_ids, timeout_seconds, num_pool_blocks,
                   is_copy_wanted);
}

nb::tuple view(const LeaseTable& self, std::size_t max_rows) {
    lease::TableView view;
    {
        const GilRelease no_gil;  // the scheduler's thread must not wait for an onlooker
        view = self.view(max_rows);
    }
    nb::list rows;
    for (const auto& row : view.rows) {
        nb::list holders;
        for (const auto& holder : row.holders) {
            holders.append(nb::make_tuple(holder.ledger_id, holder.claims, holder.releases));
        }
        const bool held = row.state == lease::SlotState::kHeld;
        const bool goes_on = row.verdict == lease::Verdict::kKeep;
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
             "timeout_seconds"_a, "num_pool_blocks"_a = kNoLimit, "is_copy_wanted"_a = false)
        .def("publish", &publish_buffer, "token"_a, "digest"_a, "num_tokens"_a, "block_ids"_a,
             "timeout_seconds"_a, "num_pool_blocks"_a = kNoLimit, "is_copy_wanted"_a = false)
        .def("publish", &publish_list, "token"_a, "digest"_a, "num_tokens"_a, "block_ids"_a,
             "timeout_seconds"_a, "num_pool_blocks"_a = kNoLimit, "is_copy_wanted"_a = false)
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
bool is_same(const lease::Token& one, const lease::Token& other) {
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
                                      info->num_tokens, info->num_blocks, info->is_copy_wanted);
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
                if (!info || !is_same(info->token, array_of<lease::Token>("token", token))) {
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

void bind_leases(const nb::module_& module) {
    bind_lease_table(module);
    bind_lease_reader(module);
}

}  // namespace mc2::bindings
