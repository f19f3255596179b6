#include "lease/table.h"

#include <sys/random.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "memory/errors.h"

namespace mc2::lease {
namespace {

std::uint64_t random_id() {
    std::uint64_t id = 0;
    if (::getrandom(&id, sizeof(id), 0) != static_cast<ssize_t>(sizeof(id))) {
        throw_errno("getrandom of " + std::to_string(sizeof(id)) + " bytes");
    }
    return id;
}

template <std::size_t kBytes>
std::uint64_t word_of(const std::array<std::byte, kBytes>& bytes, std::size_t i) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i * sizeof(word), sizeof(word));
    return word;
}

constexpr std::uint32_t next_generation(std::uint32_t generation) {
    const std::uint32_t next = generation + 1;
    return next == 0 ? 1 : next;  // 0 is what an untouched slot and an untouched ledger say
}

}  // namespace

LeaseTable::LeaseTable(std::size_t num_slots, std::size_t max_blocks)
    : geometry_(Geometry::of_index(num_slots, max_blocks, random_id())),
      segment_(make_index(geometry_)),
      words_(segment_.mapping, geometry_),
      leases_(num_slots) {
    free_.reserve(num_slots);
    active_.reserve(num_slots);
    for (std::size_t slot = num_slots; slot > 0; --slot) {
        free_.push_back(static_cast<std::uint32_t>(slot - 1));
    }
}

std::optional<LeaseId> LeaseTable::publish(const Offer& offer) {
    check(offer);
    const std::scoped_lock lock(mutex_);
    require_open();
    if (free_.empty()) {
        return std::nullopt;
    }
    const std::uint32_t slot = free_.back();
    free_.pop_back();
    active_.push_back(slot);
    write_payload(slot, offer);
    Lease& lease = leases_[slot];
    lease = {.generation = next_generation(lease.generation),
             .state = SlotState::kFree,
             .num_tokens = offer.num_tokens,
             .num_blocks = offer.block_ids.size(),
             .published = Clock::now(),
             .timeout = offer.timeout,
             .dropped = {}};
    set_state(slot, SlotState::kOffered);
    return LeaseId{.slot = slot, .generation = lease.generation};
}

void LeaseTable::check(const Offer& offer) const {
    if (offer.block_ids.size() > geometry_.max_blocks) {
        throw_invalid("lease of " + std::to_string(offer.block_ids.size()) +
                      " blocks, the table takes " + std::to_string(geometry_.max_blocks));
    }
    for (const std::uint32_t id : offer.block_ids) {
        if (id >= offer.num_pool_blocks) {
            throw_invalid("lease over block " + std::to_string(static_cast<std::int32_t>(id)) +
                          ", the pool has " + std::to_string(offer.num_pool_blocks));
        }
    }
    if (!std::isfinite(offer.timeout.count()) || offer.timeout.count() < 0) {
        throw_invalid("lease timeout of " + std::to_string(offer.timeout.count()) + " seconds");
    }
}

// Release stores: whoever sees one of these words also sees that the slot is no longer what it was.
void LeaseTable::write_payload(std::size_t slot, const Offer& offer) const {
    constexpr auto kOrder = std::memory_order_release;
    for (std::size_t i = 0; i < kTokenBytes / sizeof(std::uint64_t); ++i) {
        words_.token_word(slot, i).store(word_of(offer.token, i), kOrder);
    }
    for (std::size_t i = 0; i < kDigestBytes / sizeof(std::uint64_t); ++i) {
        words_.digest_word(slot, i).store(word_of(offer.digest, i), kOrder);
    }
    words_.num_tokens(slot).store(offer.num_tokens, kOrder);
    words_.num_blocks(slot).store(offer.block_ids.size(), kOrder);
    words_.flags(slot).store(offer.is_copy_wanted ? kCopyFlag : 0, kOrder);
    for (std::size_t i = 0; i < offer.block_ids.size(); ++i) {
        words_.block_id(slot, i).store(offer.block_ids[i], kOrder);
    }
    words_.references(slot).store(1, kOrder);
}

void LeaseTable::set_state(std::size_t slot, SlotState state) {
    Lease& lease = leases_[slot];
    lease.state = state;
    words_.state(slot).store(pack_state(lease.generation, state), std::memory_order_seq_cst);
}

std::vector<EndedLease> LeaseTable::sweep() {
    const std::scoped_lock lock(mutex_);
    require_open();
    const auto now = Clock::now();
    std::vector<EndedLease> ended;
    ended.reserve(active_.size());  // nothing may throw between FREE and the report of it
    for (std::size_t i = 0; i < active_.size();) {
        const std::uint32_t slot = active_[i];
        const Verdict verdict = decide(slot, now);
        if (verdict == Verdict::kKeep) {
            ++i;
            continue;
        }
        ended.push_back(
            {.id = {.slot = slot, .generation = leases_[slot].generation}, .reason = verdict});
        active_[i] = active_.back();
        active_.pop_back();
        free_.push_back(slot);
    }
    return ended;
}

Verdict LeaseTable::decide(std::size_t slot, Clock::time_point now) {
    const Lease& lease = leases_[slot];
    const bool timed_out = now - lease.published >= lease.timeout;
    Counts counts = look(slot);
    if (judge(counts, timed_out) == Verdict::kKeep) {
        keep(slot, counts);
        return Verdict::kKeep;
    }
    set_state(slot, SlotState::kExpiring);
    counts = look(slot);
    const Verdict verdict = judge(counts, timed_out);
    if (verdict == Verdict::kKeep) {
        keep(slot, counts);
    } else {
        set_state(slot, SlotState::kFree);
    }
    return verdict;
}

// Stores only what changes: an idle sweep must not take the cache lines away from the decodes.
void LeaseTable::keep(std::size_t slot, const Counts& counts) {
    const SlotState state = counts.claims > 0 ? SlotState::kHeld : SlotState::kOffered;
    const std::uint64_t references = 1 + counts.active;
    if (words_.references(slot).load(std::memory_order_relaxed) != references) {
        words_.references(slot).store(references, std::memory_order_release);
    }
    if (leases_[slot].state != state) {
        set_state(slot, state);
    }
}

Counts LeaseTable::look(std::size_t slot) const {
    Counts counts = leases_[slot].dropped;
    for (const auto& entry : ledgers_) {
        const auto word =
            LedgerWord::unpack(entry.second.words.ledger(slot).load(std::memory_order_seq_cst));
        if (word.generation == leases_[slot].generation) {
            counts.add(word);
        }
    }
    return counts;
}

LedgerHandle LeaseTable::add_ledger() {
    // num_slots and table_id never change, so the system calls need no lock.
    const Geometry geometry = Geometry::of_ledger(geometry_.num_slots, geometry_.table_id);
    NewSegment segment = make_ledger(geometry);
    const int fd = segment.file.get();
    const Words words(segment.mapping, geometry);
    const std::scoped_lock lock(mutex_);
    require_open();
    const std::uint64_t id = next_ledger_id_++;
    ledgers_.emplace(id, Ledger{.segment = std::move(segment), .words = words});
    return {.id = id, .fd = fd};
}

void LeaseTable::drop_ledger(std::uint64_t id) {
    const std::scoped_lock lock(mutex_);
    require_open();
    const auto node = ledgers_.extract(id);
    if (node.empty()) {
        throw_invalid("no ledger " + std::to_string(id));
    }
    for (const std::uint32_t slot : active_) {
        const auto word =
            LedgerWord::unpack(node.mapped().words.ledger(slot).load(std::memory_order_seq_cst));
        if (word.generation == leases_[slot].generation) {
            leases_[slot].dropped.add_dropped(word);
        }
    }
}

TableView LeaseTable::view(std::size_t max_rows) const {
    std::vector<Sighting> sightings = sight();
    TableView view{.num_leases = sightings.size(), .rows = {}};
    const auto num_rows = std::min(max_rows, sightings.size());
    std::partial_sort(sightings.begin(), sightings.begin() + static_cast<std::ptrdiff_t>(num_rows),
                      sightings.end(), [](const Sighting& a, const Sighting& b) {
                          return a.published < b.published;
                      });
    sightings.resize(num_rows);
    view.rows.reserve(num_rows);
    const auto now = Clock::now();
    for (const auto& [id, published] : sightings) {
        const std::scoped_lock lock(mutex_);
        require_open();
        const Lease& lease = leases_[id.slot];
        if (lease.generation == id.generation && lease.state != SlotState::kFree) {
            view.rows.push_back(row_of(id.slot, now));
        }  // else it has ended in the meantime
    }
    return view;
}

std::vector<LeaseTable::Sighting> LeaseTable::sight() const {
    const std::scoped_lock lock(mutex_);
    require_open();
    std::vector<Sighting> sightings;
    sightings.reserve(active_.size());
    for (const std::uint32_t slot : active_) {
        const Lease& lease = leases_[slot];
        sightings.push_back(
            {.id = {.slot = slot, .generation = lease.generation}, .published = lease.published});
    }
    return sightings;
}

LeaseRow LeaseTable::row_of(std::size_t slot, Clock::time_point now) const {
    const Lease& lease = leases_[slot];
    Counts counts = lease.dropped;
    std::vector<LeaseHolder> holders;
    for (const auto& [ledger_id, ledger] : ledgers_) {
        const auto word =
            LedgerWord::unpack(ledger.words.ledger(slot).load(std::memory_order_seq_cst));
        if (word.generation == lease.generation && word.claims > 0) {
            counts.add(word);
            holders.push_back(
                {.ledger_id = ledger_id, .claims = word.claims, .releases = word.releases});
        }
    }
    return {.id = {.slot = static_cast<std::uint32_t>(slot), .generation = lease.generation},
            .state = counts.claims > 0 ? SlotState::kHeld : SlotState::kOffered,
            .verdict = judge(counts, now - lease.published >= lease.timeout),
            .num_tokens = lease.num_tokens,
            .num_blocks = lease.num_blocks,
            .claims = counts.claims,
            .releases = counts.claims - counts.active,
            .age = now - lease.published,
            .holders = std::move(holders)};
}

void LeaseTable::close() {
    const std::scoped_lock lock(mutex_);
    ledgers_.clear();
    active_.clear();
    free_.clear();
    segment_ = {};
    words_ = {};
}

void LeaseTable::require_open() const {
    if (!segment_.file.valid()) {
        throw_invalid("lease table is closed");
    }
}

int LeaseTable::fd() const {
    const std::scoped_lock lock(mutex_);
    require_open();
    return segment_.file.get();
}

std::size_t LeaseTable::num_active() const {
    const std::scoped_lock lock(mutex_);
    return active_.size();
}

}  // namespace mc2::lease
