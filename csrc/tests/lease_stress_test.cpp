// Claim against expire and release from several threads, with blocks whose reuse ThreadSanitizer can see.
//
// "The blocks" of a slot are one plain integer: P writes the generation before it publishes and clears it after the lease
// has ended; a decode reads it while it holds. Any overlap is a data race for ThreadSanitizer and a wrong value for us.
#include <atomic>
#include <random>
#include <thread>

#include "lease_fixture.h"

namespace {

using mc2::lease::Claimant;
using mc2::lease::ClaimResult;
using mc2::lease::LeaseId;
using mc2::lease::LeaseTable;
using mc2::lease::TestAccess;

constexpr std::size_t kNumSlots = 4;  // few, so that slots are reused under the decodes' eyes
constexpr int kNumDecodes = 3;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kNumLeases = 10'000;
#else
constexpr std::uint64_t kNumLeases = 50'000;
#endif
constexpr auto kTimeBudget = std::chrono::seconds(20);

struct World {
    LeaseTable table{kNumSlots, 4};
    std::array<std::uint64_t, kNumSlots> blocks{};                // plain on purpose
    std::array<std::atomic<std::uint64_t>, kNumSlots> tickets{};  // last generation of each slot
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> num_held{0};
    std::atomic<std::uint64_t> num_pending{0};
    std::atomic<std::uint64_t> num_dead{0};
    std::atomic<std::uint64_t> num_deaths{0};
    std::atomic<std::uint64_t> num_wrong{0};
};

// One life of a decode: claims at random until it dies with whatever it holds.
class Life {
 public:
    Life(World& world, std::uint32_t seed)
        : world_(world),
          random_(seed),
          ledger_(world.table.add_ledger()),
          claimant_(TestAccess::index(world.table),
                    TestAccess::writable_ledger(world.table, ledger_.id), kNumSlots, 4) {}

    void run(int num_steps) {
        for (int step = 0; step < num_steps && !world_.stop; ++step) {
            if (held_.empty() || pick(3) > 0) {
                claim_one();
            } else {
                release_one();
            }
        }
        if (pick(2) == 0) {  // half of them die tidily
            while (!held_.empty()) {
                release_one();
            }
        }
        world_.table.drop_ledger(ledger_.id);
        ++world_.num_deaths;
    }

 private:
    std::size_t pick(std::size_t bound) { return random_() % bound; }

    void claim_one() {
        const auto slot = static_cast<std::uint32_t>(pick(kNumSlots));
        const std::uint64_t ticket = world_.tickets[slot].load(std::memory_order_relaxed);
        // Mostly the present ticket, sometimes the one before or the one to come.
        const auto drift = pick(16);
        const std::uint64_t generation =
            drift == 0 ? ticket - 1 : (drift == 1 ? ticket + 1 : ticket);
        if (pick(4) == 0) {
            const auto info = claimant_.peek(slot, generation);
            if (info && info->token != mc2::test::token(static_cast<std::uint8_t>(generation))) {
                ++world_.num_wrong;
            }
        }
        ClaimResult result = claimant_.claim(slot, generation);
        while (result == ClaimResult::kPending) {
            ++world_.num_pending;
            result = claimant_.poll(slot, generation);
        }
        if (result == ClaimResult::kDead) {
            ++world_.num_dead;
            return;
        }
        ++world_.num_held;
        const LeaseId id{.slot = slot, .generation = static_cast<std::uint32_t>(generation)};
        held_.push_back(id);
        read_blocks(id);
        if (claimant_.blocks(slot, generation) != std::vector<std::uint32_t>{slot, id.generation}) {
            ++world_.num_wrong;
        }
    }

    void release_one() {
        const std::size_t i = pick(held_.size());
        read_blocks(held_[i]);
        claimant_.release(held_[i].slot, held_[i].generation);
        held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
    }

    void read_blocks(const LeaseId& id) {
        if (world_.blocks[id.slot] != id.generation) {
            ++world_.num_wrong;
        }
    }

    World& world_;
    std::mt19937 random_;
    mc2::lease::LedgerHandle ledger_;
    Claimant claimant_;
    std::vector<LeaseId> held_;
};

void sweep(World& world) {
    for (const auto& ended : world.table.sweep()) {
        if (world.blocks[ended.id.slot] != ended.id.generation) {
            ++world.num_wrong;  // ended twice
        }
        world.blocks[ended.id.slot] = 0;  // a reader that still holds would race with this
    }
}

// The slot that publish will take is the one freed last; P alone decides, so it may look.
void publish_one(World& world, std::uint64_t count) {
    const std::uint32_t slot = TestAccess::next_slot(world.table);
    const std::uint32_t generation = TestAccess::next_generation(world.table, slot);
    world.blocks[slot] = generation;
    const double timeout = count % 3 == 0 ? mc2::test::kForever : 0.0;
    const auto id = mc2::test::publish(world.table, timeout, {slot, generation},
                                       static_cast<std::uint8_t>(generation));
    CHECK(id && id->slot == slot && id->generation == generation);
    world.tickets[slot].store(generation, std::memory_order_relaxed);
}

MC2_TEST(nobody_reads_what_is_reused) {
    World world;
    {
        std::vector<std::jthread> decodes;
        decodes.reserve(kNumDecodes);
        for (int i = 0; i < kNumDecodes; ++i) {
            decodes.emplace_back([&world, i] {
                for (std::uint32_t life = 0; !world.stop; ++life) {
                    Life(world, life * kNumDecodes + static_cast<std::uint32_t>(i)).run(300);
                }
            });
        }
        const auto end = std::chrono::steady_clock::now() + kTimeBudget;
        std::uint64_t num_published = 0;
        while (num_published < kNumLeases && std::chrono::steady_clock::now() < end) {
            if (world.table.num_active() < kNumSlots) {
                publish_one(world, ++num_published);
                if (num_published % 2 == 0) {
                    std::this_thread::yield();  // two cores must not keep the decodes out
                }
            }
            sweep(world);
        }
        world.stop = true;
        CHECK(num_published >= 100);
        std::cout << num_published << " leases: " << world.num_held << " held, "
                  << world.num_pending << " pending polls, " << world.num_dead << " dead, "
                  << world.num_deaths << " deaths\n";
    }
    CHECK_EQ(world.num_wrong, 0U);
    CHECK(world.num_held > 0 && world.num_dead > 0 && world.num_deaths > 0);
    // All decodes are gone, so whatever was claimed ends now; unclaimed long offers are claimed and released once more.
    sweep(world);
    mc2::lease::LedgerHandle ledger = world.table.add_ledger();
    Claimant last(TestAccess::index(world.table),
                  TestAccess::writable_ledger(world.table, ledger.id), kNumSlots, 4);
    for (const auto& row : world.table.view(kNumSlots).rows) {
        CHECK(last.claim(row.id.slot, row.id.generation) == ClaimResult::kHeld);
        last.release(row.id.slot, row.id.generation);
    }
    sweep(world);
    CHECK_EQ(world.table.num_active(), 0U);
}

// An onlooker as `inspect` is one: on another thread, at any time.
void look_on(World& world, std::atomic<std::uint64_t>& num_rows) {
    while (!world.stop) {
        const auto view = world.table.view(kNumSlots);
        if (view.num_leases > kNumSlots || view.rows.size() > view.num_leases) {
            ++world.num_wrong;
        }
        for (const auto& row : view.rows) {
            std::uint64_t claims = 0;
            for (const auto& holder : row.holders) {
                claims += holder.claims;
            }
            const bool right = row.num_blocks == 2 && row.num_tokens == 20 &&
                               row.id.generation > 0 && claims <= row.claims &&
                               row.releases <= row.claims;
            world.num_wrong += right ? 0 : 1;
            ++num_rows;
        }
    }
}

MC2_TEST(a_view_may_be_taken_at_any_time) {
    World world;
    std::atomic<std::uint64_t> num_rows{0};
    {
        std::vector<std::jthread> others;
        others.emplace_back([&] { look_on(world, num_rows); });
        others.emplace_back([&world] {
            for (std::uint32_t life = 0; !world.stop; ++life) {
                Life(world, life).run(300);
            }
        });
        const auto end = std::chrono::steady_clock::now() + kTimeBudget;
        std::uint64_t num_published = 0;
        while ((num_published < kNumLeases / 2 || num_rows < 1000) &&
               std::chrono::steady_clock::now() < end) {
            if (world.table.num_active() < kNumSlots) {
                publish_one(world, ++num_published);
            }
            sweep(world);
        }
        world.stop = true;
        std::cout << num_published << " leases, " << num_rows << " rows seen\n";
    }
    CHECK_EQ(world.num_wrong, 0U);
    CHECK(num_rows > 0);
}

}  // namespace
