// Lease segments in which the other side writes what it likes.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "fuzz_input.h"
#include "lease_fixture.h"
#include "memory/file_descriptor.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace mc2::fuzz {
namespace {

using lease::Claimant;
using lease::ClaimResult;
using lease::Geometry;
using lease::LeaseId;
using lease::LeaseTable;
using lease::LedgerWord;
using lease::SlotState;
using lease::Words;

constexpr std::size_t kNumSlots = 3;
constexpr std::size_t kMaxBlocks = 10;
constexpr std::uint64_t kTableId = 99;

// What lies behind a segment on its last page belongs to nobody. Only AddressSanitizer can see that it is touched.
void forbid([[maybe_unused]] const std::byte* begin, [[maybe_unused]] std::size_t num_bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(begin, num_bytes);
#endif
}

constexpr std::size_t kPageBytes = 4096;

FileDescriptor sealed_file(std::size_t num_bytes) {
    FileDescriptor file = make_memfd("fuzz", num_bytes, false);
    add_seals(file.get(), F_SEAL_SHRINK);
    return file;
}

// A segment that both sides have mapped, as one mapping: ThreadSanitizer knows memory by its address.
struct Segment {
    explicit Segment(const Geometry& wanted)
        : geometry(wanted),
          file(sealed_file(wanted.total_bytes)),
          mapping(Mapping::of_file(file.get(), wanted.total_bytes, Access::kReadWrite)),
          words(mapping, geometry) {
        forbid(mapping.data() + geometry.total_bytes,
               kPageBytes - geometry.total_bytes % kPageBytes);
    }
    Geometry geometry;
    FileDescriptor file;
    Mapping mapping;
    Words words;
};

// One slot's word or block id becomes anything.
void scribble(Input& input, const Words& words) {
    const std::size_t slot = input.below(kNumSlots);
    const auto what = input.take<std::uint8_t>();
    const std::uint64_t value = input.number();
    switch (what % 8) {
        case 0:
            words.state(slot).store(value);
            break;
        case 1:
        case 2:
            words.state(slot).store(lease::pack_state(static_cast<std::uint32_t>(what / 8 % 4),
                                                      static_cast<SlotState>(value % 5)));
            break;
        case 3:
            words.num_blocks(slot).store(value);
            break;
        case 4:
            words.num_blocks(slot).store(value % (kMaxBlocks + 2));
            break;
        case 5:
            words.token_word(slot, what / 8 % 2).store(value);
            break;
        case 6:
            words.flags(slot).store(value);
            break;
        default:
            words.block_id(slot, value % kMaxBlocks)
                .store(static_cast<std::uint32_t>(input.number()));
    }
}

// What decode believes of one slot, kept apart from the class that is tested.
struct Model {
    std::uint32_t generation = 0;
    std::uint32_t held = 0;
    std::uint32_t pending = 0;
};

class ReaderSession {
 public:
    ReaderSession(const Words& index, const Words& ledger)
        : index_(index), ledger_(ledger), claimant_(index, ledger, kNumSlots, kMaxBlocks) {}

    void step(Input& input) {
        const auto action = input.take<std::uint8_t>();
        if (action % 4 < 2) {
            scribble(input, index_);
            return;
        }
        const std::size_t slot = action < 250 ? input.below(kNumSlots + 1) : input.number();
        const std::uint64_t generation = action < 240 ? action / 16 % 4 : input.number();
        switch (action / 4 % 6) {
            case 0:
                peek(slot, generation);
                break;
            case 1:
                claim(slot, generation);
                break;
            case 2:
                poll(slot, generation);
                break;
            case 3:
                blocks(slot, generation);
                break;
            case 4:
                table(slot, generation, static_cast<std::uint32_t>(input.number()),
                      static_cast<std::uint32_t>(input.number()));
                break;
            default:
                release(slot, generation);
        }
        check();
    }

 private:
    [[nodiscard]] bool has(std::uint64_t slot, std::uint64_t generation, bool held) const {
        if (slot >= kNumSlots || models_[slot].generation != generation) {
            return false;
        }
        return (held ? models_[slot].held : models_[slot].pending) > 0;
    }
    void peek(std::uint64_t slot, std::uint64_t generation) const {
        const auto info = claimant_.peek(slot, generation);
        require(!info || (slot < kNumSlots && info->num_blocks <= kMaxBlocks),
                "an offer of more blocks than a slot takes");
    }
    void settle(Model& model, ClaimResult result) {
        if (result != ClaimResult::kPending) {
            --model.pending;
            model.held += result == ClaimResult::kHeld ? 1 : 0;
        }
    }
    void claim(std::uint64_t slot, std::uint64_t generation) {
        const std::uint64_t before = slot < kNumSlots ? ledger_.ledger(slot).load() : 0;
        const ClaimResult result = claimant_.claim(slot, generation);
        if (slot >= kNumSlots) {
            require(result == ClaimResult::kDead, "a claim on no slot");
            return;
        }
        if (result == ClaimResult::kDead) {
            // A claim that is dead at once leaves no trace but perhaps a generation without claims.
            const auto word = LedgerWord::unpack(ledger_.ledger(slot).load());
            require(word.pack() == before || word.claims == word.releases,
                    "a dead claim stands in the ledger");
            return;
        }
        Model& model = models_[slot];
        require(model.generation == generation || model.held + model.pending == 0,
                "a claim over claims on another generation");
        model.generation = static_cast<std::uint32_t>(generation);
        ++model.pending;
        settle(model, result);
    }
    void poll(std::uint64_t slot, std::uint64_t generation) {
        const bool is_pending = has(slot, generation, false);
        ClaimResult result = ClaimResult::kDead;
        const bool refused = is_refused([&] { result = claimant_.poll(slot, generation); });
        require(refused != is_pending, "poll of what is not pending");
        if (is_pending) {
            settle(models_[slot], result);
        }
    }
    void blocks(std::uint64_t slot, std::uint64_t generation) const {
        std::vector<std::uint32_t> ids;
        const bool refused = is_refused([&] { ids = claimant_.blocks(slot, generation); });
        require(refused || has(slot, generation, true), "blocks of a lease that is not held");
        require(ids.size() <= kMaxBlocks, "more blocks than a slot takes");
    }
    void table(std::uint64_t slot, std::uint64_t generation, std::uint32_t base,
               std::uint32_t num_blocks) const {
        std::vector<std::int32_t> ids;
        const bool refused =
            is_refused([&] { ids = claimant_.block_table(slot, generation, base, num_blocks); });
        require(refused || has(slot, generation, true), "the table of a lease that is not held");
        require(std::ranges::all_of(ids,
                                    [&](std::int64_t id) {
                                        const auto first = std::int64_t{base};
                                        return id >= first && id < first + num_blocks;
                                    }),
                "a block that the pool does not have");
    }
    void release(std::uint64_t slot, std::uint64_t generation) {
        const bool is_held = has(slot, generation, true);
        require(is_refused([&] { claimant_.release(slot, generation); }) != is_held,
                "release of what is not held");
        if (is_held) {
            --models_[slot].held;
        }
    }
    // The ledger says what decode holds, whatever the index says.
    void check() const {
        for (std::size_t slot = 0; slot < kNumSlots; ++slot) {
            const auto word = LedgerWord::unpack(ledger_.ledger(slot).load());
            require(word.releases <= word.claims, "more released than claimed");
            if (word.generation == models_[slot].generation) {
                require(word.active() == models_[slot].held + models_[slot].pending,
                        "the ledger says something else than what is held");
            } else {
                require(word.active() == 0, "a claim of nobody");
            }
        }
    }

    Words index_;
    Words ledger_;
    Claimant claimant_;
    std::array<Model, kNumSlots> models_{};
};

}  // namespace

void fuzz_reader(Input& input) {
    static const Segment index(Geometry::of_index(kNumSlots, kMaxBlocks, kTableId));
    static const Segment ledger(Geometry::of_ledger(kNumSlots, kTableId));
    std::memset(index.mapping.data(), 0, index.geometry.total_bytes);
    std::memset(ledger.mapping.data(), 0, ledger.geometry.total_bytes);
    ReaderSession session(index.words, ledger.words);
    while (!input.is_empty()) {
        session.step(input);
    }
}

namespace {

// A header that is right but for what the input changes.
void write_forged_header(Input& input, const FileDescriptor& file, const Geometry& geometry) {
    std::array<std::uint64_t, sizeof(lease::Header) / sizeof(std::uint64_t)> words{
        geometry.magic,      lease::kVersion,      geometry.table_id,    geometry.num_slots,
        geometry.max_blocks, geometry.slot_stride, geometry.total_bytes, 0};
    for (auto changes = input.take<std::uint8_t>() % 4; changes > 0; --changes) {
        const std::size_t which = input.below(words.size());
        words[which] = input.number();
    }
    require(
        ::pwrite(file.get(), words.data(), sizeof(words), 0) == static_cast<ssize_t>(sizeof(words)),
        "pwrite");
}

}  // namespace

void fuzz_open(Input& input) {
    const auto index_kind = input.take<std::uint8_t>();
    const std::size_t num_slots = 1 + index_kind % 5;
    const std::size_t max_blocks = 1 + index_kind / 5 % 40;
    const Geometry index = Geometry::of_index(num_slots, max_blocks, kTableId);
    const Geometry ledger = Geometry::of_ledger(num_slots, kTableId);
    const auto shape = input.take<std::uint8_t>();
    const std::size_t index_bytes = shape % 4 == 0 ? input.below(1 << 14) : index.total_bytes;
    const std::size_t ledger_bytes = shape % 8 == 1 ? input.below(1 << 10) : ledger.total_bytes;
    FileDescriptor index_file = make_memfd("fuzz", index_bytes, false);
    FileDescriptor ledger_file = make_memfd("fuzz", ledger_bytes, false);
    write_forged_header(input, index_file, index);
    write_forged_header(input, ledger_file, ledger);
    if (shape < 250) {
        add_seals(index_file.get(), F_SEAL_SHRINK);
        add_seals(ledger_file.get(), F_SEAL_SHRINK);
    }
    std::optional<lease::LeaseReader> reader;
    if (is_refused([&] { reader.emplace(index_file.get(), ledger_file.get()); })) {
        return;
    }
    require(shape < 250, "a segment that can shrink was taken");
    // Whatever the header said: the last slot's last word is readable.
    const std::size_t last = reader->num_slots() - 1;
    require(lease::Geometry::of_index(reader->num_slots(), reader->max_blocks(), 0).total_bytes <=
                std::max(index_bytes, sizeof(lease::Header)),
            "a table larger than its file");
    (void)reader->claimant().peek(last, 1);
    if (reader->claimant().claim(last, 1) == ClaimResult::kHeld) {
        (void)is_refused([&] { (void)reader->claimant().blocks(last, 1); });
    }
}

namespace {

constexpr std::size_t kNumHostile = 2;

// Prefill, an honest decode, and two that write anything into their ledgers.
class TableSession {
 public:
    TableSession()
        : honest_ledger_(table_.add_ledger()),
          honest_(lease::TestAccess::index(table_),
                  lease::TestAccess::writable_ledger(table_, honest_ledger_.id), kNumSlots,
                  kMaxBlocks) {
        for (auto& each : hostile_) {
            add(each);
        }
    }

    void run(Input& input) {
        while (!input.is_empty()) {
            step(input);
        }
        finish();
    }

 private:
    struct Hostile {
        std::uint64_t id = 0;
        Words words;
    };
    struct Offered {
        std::vector<std::uint32_t> blocks;
        std::uint32_t held = 0;
    };

    void add(Hostile& hostile) {
        hostile.id = table_.add_ledger().id;
        hostile.words = lease::TestAccess::writable_ledger(table_, hostile.id);
    }
    void step(Input& input) {
        const auto action = input.take<std::uint8_t>();
        Hostile& hostile = hostile_[action / 16 % kNumHostile];
        switch (action % 8) {
            case 0:
                publish(input);
                break;
            case 1:
                hostile.words.ledger(input.below(kNumSlots)).store(input.number());
                break;
            case 2:
            case 3:
                hostile_claim(input, hostile);
                break;
            case 4:
                claim(input.below(kNumSlots));
                break;
            case 5:
                release(input.below(kNumSlots));
                break;
            case 6:
                sweep();
                break;
            default:
                if (action == 7) {  // rare, since it makes a file
                    table_.drop_ledger(hostile.id);
                    add(hostile);
                }
                view(action % 5);
        }
    }
    void publish(Input& input) {
        std::vector<std::uint32_t> blocks(input.below(kMaxBlocks + 2));
        for (auto& each : blocks) {
            each = static_cast<std::uint32_t>(input.number());
        }
        const std::uint64_t pool = input.take<std::uint8_t>() < 200 ? std::uint64_t{1} << 32U : 100;
        const double timeout = input.take<std::uint8_t>() % 2 == 0 ? 0.0 : test::kForever;
        std::optional<LeaseId> id;
        const bool refused = is_refused([&] {
            id = table_.publish({.token = test::token(1),
                                 .digest = test::digest(2),
                                 .num_tokens = blocks.size(),
                                 .block_ids = blocks,
                                 .timeout = std::chrono::duration<double>(timeout),
                                 .num_pool_blocks = pool});
        });
        const bool is_wrong = blocks.size() > kMaxBlocks ||
                              std::ranges::any_of(blocks, [&](auto each) { return each >= pool; });
        require(refused == is_wrong, "publish takes what it must not, or refuses what is right");
        if (id) {
            require(!leases_[id->slot] && id->generation != 0, "a slot that is in use");
            leases_[id->slot] = Offered{.blocks = blocks, .held = 0};
            generations_[id->slot] = id->generation;
        } else {
            require(refused || std::ranges::all_of(
                                   leases_, [](const auto& each) { return each.has_value(); }),
                    "no slot, though one is free");
        }
    }
    // The right generation, so that it counts.
    void hostile_claim(Input& input, const Hostile& hostile) {
        const std::size_t slot = input.below(kNumSlots);
        const LedgerWord word{.generation = generations_[slot],
                              .claims = input.take<std::uint16_t>(),
                              .releases = input.take<std::uint16_t>()};
        hostile.words.ledger(slot).store(word.pack());
    }
    void claim(std::size_t slot) {
        const ClaimResult result = honest_.claim(slot, generations_[slot]);
        require((result == ClaimResult::kHeld) == leases_[slot].has_value(),
                "a claim that holds on nothing, or fails on a lease");
        if (leases_[slot]) {
            ++leases_[slot]->held;
            require(honest_.blocks(slot, generations_[slot]) == leases_[slot]->blocks,
                    "other blocks than were published");
        }
    }
    void release(std::size_t slot) {
        const bool is_held = leases_[slot] && leases_[slot]->held > 0;
        require(is_refused([&] { honest_.release(slot, generations_[slot]); }) != is_held,
                "release of what is not held");
        if (is_held) {
            --leases_[slot]->held;
        }
    }
    void sweep() {
        for (const auto& ended : table_.sweep()) {
            auto& lease = leases_[ended.id.slot];
            require(lease && generations_[ended.id.slot] == ended.id.generation,
                    "the end of a lease that is none");
            require(lease->held == 0, "a lease has ended that is held");
            lease.reset();
        }
    }
    void view(std::size_t max_rows) const {
        const auto view = table_.view(max_rows);
        require(view.rows.size() <= max_rows && view.num_leases <= kNumSlots, "too many rows");
        for (const auto& row : view.rows) {
            require(row.id.slot < kNumSlots && leases_[row.id.slot].has_value(),
                    "a row of no lease");
            require(row.releases <= row.claims && row.holders.size() <= kNumHostile + 1,
                    "a row that cannot be");
        }
    }
    // Once the hostile ones are quiet, every lease ends: nothing that they wrote has stuck.
    void finish() {
        for (const Hostile& each : hostile_) {
            for (std::size_t slot = 0; slot < kNumSlots; ++slot) {
                each.words.ledger(slot).store(0);
            }
        }
        for (std::size_t slot = 0; slot < kNumSlots; ++slot) {
            if (leases_[slot] && leases_[slot]->held == 0) {
                claim(slot);
            }
            while (leases_[slot] && leases_[slot]->held > 0) {
                release(slot);
            }
        }
        sweep();
        require(table_.num_active() == 0, "a lease that nobody holds goes on");
    }

    LeaseTable table_{kNumSlots, kMaxBlocks};
    lease::LedgerHandle honest_ledger_;
    Claimant honest_;
    std::array<Hostile, kNumHostile> hostile_{};
    std::array<std::optional<Offered>, kNumSlots> leases_{};
    std::array<std::uint32_t, kNumSlots> generations_{};
};

}  // namespace

void fuzz_table(Input& input) {
    // One for all inputs, for it takes many system calls to make. Each input leaves it empty.
    static TableSession session;
    session.run(input);
}

}  // namespace mc2::fuzz
