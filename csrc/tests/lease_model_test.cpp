// Every interleaving of the protocol for one slot, one prefill and two decodes, explored state by state. The decisions are
// the production ones (judge, verdict_on_claim); only memory and scheduling are modelled, one shared access per step.
//
// Checked: no lease is freed while a live decode holds it; no decode holds a lease that has ended; no lease that nobody
// has claimed, or that somebody still holds, is ended as released; from every state all leases can still end.
// Mutants show that the model can fail: each leaves one rule of protocol.h out and must be caught.
#include <array>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "check.h"
#include "lease/protocol.h"

namespace {

using mc2::lease::ClaimResult;
using mc2::lease::Counts;
using mc2::lease::judge;
using mc2::lease::LedgerWord;
using mc2::lease::SlotState;
using mc2::lease::Verdict;

constexpr std::size_t kNumDecodes = 2;
constexpr std::uint8_t kLastGeneration = 2;
constexpr std::uint8_t kMaxClaims = 2;  // per decode and generation

struct Rules {
    bool second_look = true;        // look at the ledgers again after EXPIRING
    bool look_before_write = true;  // D writes only for a generation it saw live
    bool take_back_dead = true;     // a dead claim is taken back, not counted as released
    bool wait_for_verdict = true;   // EXPIRING is pending, not held
};

enum class PStep : std::uint8_t { kIdle, kFirstLook, kExpiring, kSecondLook };
enum class DStep : std::uint8_t { kIdle, kLooked, kWritten, kPending, kDead };

struct Decode {
    DStep step = DStep::kIdle;
    std::uint8_t generation = 0;  // of the claim in progress
    std::uint8_t held = 0;        // claims of `word_generation`
    std::uint8_t word_generation = 0;
    std::uint8_t claims = 0;
    std::uint8_t releases = 0;
    bool alive = true;
    bool dropped = false;
};

struct State {
    SlotState slot = SlotState::kFree;
    std::uint8_t generation = 0;
    PStep step = PStep::kIdle;
    std::uint8_t next_ledger = 0;  // progress of a look
    std::uint8_t seen_claims = 0;
    std::uint8_t seen_active = 0;
    std::uint8_t dropped_claims = 0;
    std::uint8_t gone = 0;
    bool timed_out = false;
    bool has_released = false;  // somebody gave up a claim that it really held, of this generation
    std::array<Decode, kNumDecodes> decodes{};
};

// Only bytes without padding in between, so that states compare as bytes.
static_assert(sizeof(Decode) == 8 && sizeof(State) == 10 + sizeof(Decode) * kNumDecodes);
struct Hash {
    std::size_t operator()(const State& state) const {
        return std::hash<std::string_view>{}(
            {reinterpret_cast<const char*>(&state), sizeof(State)});
    }
};
struct Equal {
    bool operator()(const State& a, const State& b) const {
        return std::memcmp(&a, &b, sizeof(State)) == 0;
    }
};

class Model {
 public:
    explicit Model(const Rules& rules) : rules_(rules) {}

    // The first violation found, or nothing.
    std::string explore() {
        visit(State{}, kNobody);
        for (std::size_t i = 0; i < states_.size() && violation_.empty(); ++i) {
            current_ = i;
            expand(State(states_[i]));  // a copy, as the vector grows meanwhile
        }
        if (violation_.empty()) {
            check_every_lease_can_end();
        }
        return violation_;
    }
    [[nodiscard]] std::size_t num_states() const { return states_.size(); }

 private:
    static constexpr std::size_t kNobody = ~std::size_t{0};

    void visit(const State& state, std::size_t from) {
        const auto [it, is_new] = index_.try_emplace(state, states_.size());
        if (is_new) {
            states_.push_back(state);
            predecessors_.emplace_back();
        }
        if (from != kNobody) {
            predecessors_[it->second].push_back(from);
        }
    }

    void expand(const State& state) {
        expand_prefill(state);
        for (std::size_t i = 0; i < kNumDecodes; ++i) {
            const Decode& decode = state.decodes[i];
            if (decode.alive) {
                expand_decode(state, i);
                State next = state;  // killed at any step, but no lease may need that to end
                next.decodes[i].alive = false;
                visit(next, kNobody);
            }
        }
    }

    void expand_prefill(const State& state) {
        State next = state;
        switch (state.step) {
            case PStep::kIdle:
                expand_idle_prefill(state);
                return;
            case PStep::kFirstLook:
            case PStep::kSecondLook:
                if (state.next_ledger < kNumDecodes) {
                    look_at_next(next);
                } else {
                    conclude(next);
                }
                break;
            case PStep::kExpiring:
                next.slot = SlotState::kExpiring;
                next.step = PStep::kSecondLook;
                if (rules_.second_look) {
                    start_look(next);
                }
                break;
        }
        visit(next, current_);
    }

    void expand_idle_prefill(const State& state) {
        State next = state;
        if (state.slot == SlotState::kFree) {
            if (state.generation < kLastGeneration) {
                next.generation++;
                next.slot = SlotState::kOffered;
                next.timed_out = next.has_released = false;
                next.dropped_claims = next.gone = 0;
                visit(next, current_);
            }
            return;
        }
        next.step = PStep::kFirstLook;
        start_look(next);
        visit(next, current_);
        if (!state.timed_out) {
            next = state;
            next.timed_out = true;
            visit(next, current_);
        }
        for (std::size_t i = 0; i < kNumDecodes;
             ++i) {  // drop the dead, under the same lock as a sweep
            const Decode& decode = state.decodes[i];
            if (decode.alive || decode.dropped) {
                continue;
            }
            next = state;
            next.decodes[i].dropped = true;
            if (decode.word_generation == state.generation) {
                Counts counts;
                counts.add_dropped(word_of(decode));
                next.dropped_claims += static_cast<std::uint8_t>(counts.claims);
                next.gone += static_cast<std::uint8_t>(counts.gone);
            }
            visit(next, current_);
        }
    }

    static LedgerWord word_of(const Decode& decode) {
        return {.generation = decode.word_generation,
                .claims = decode.claims,
                .releases = decode.releases};
    }
    static void start_look(State& state) {
        state.next_ledger = 0;
        state.seen_claims = state.dropped_claims;
        state.seen_active = 0;
    }
    static void look_at_next(State& state) {
        const Decode& decode = state.decodes[state.next_ledger++];
        if (!decode.dropped && decode.word_generation == state.generation) {
            Counts counts;
            counts.add(word_of(decode));
            state.seen_claims += static_cast<std::uint8_t>(counts.claims);
            state.seen_active += static_cast<std::uint8_t>(counts.active);
        }
    }

    void conclude(State& state) {
        const Counts counts{
            .claims = state.seen_claims, .active = state.seen_active, .gone = state.gone};
        const Verdict verdict = judge(counts, state.timed_out);
        if (verdict == Verdict::kKeep) {
            state.slot = counts.claims > 0 ? SlotState::kHeld : SlotState::kOffered;
            state.step = PStep::kIdle;
        } else if (state.step == PStep::kFirstLook) {
            state.step = PStep::kExpiring;
            return;  // what was seen stays, for the mutant without a second look
        } else {
            end_lease(state, verdict);
        }
        state.next_ledger = state.seen_claims = state.seen_active = 0;
    }

    void end_lease(State& state, Verdict verdict) {
        for (const Decode& decode : state.decodes) {
            const bool concerns = decode.word_generation == state.generation;
            if (decode.alive && concerns && decode.held > 0) {
                violation_ = "freed while held";
            }
        }
        if (verdict == Verdict::kReleased && !state.has_released) {
            violation_ = "ended as released, but nobody held and released it";
        }
        state.slot = SlotState::kFree;
        state.step = PStep::kIdle;
        state.timed_out = state.has_released = false;
        state.dropped_claims = state.gone = 0;
    }

    void expand_decode(const State& state, std::size_t i) {
        const Decode& decode = state.decodes[i];
        State next = state;
        Decode& self = next.decodes[i];
        switch (decode.step) {
            case DStep::kIdle:
                expand_idle_decode(state, i);
                return;
            case DStep::kLooked:
                if (self.word_generation != self.generation) {
                    self.word_generation = self.generation;
                    self.claims = self.releases = 0;
                }
                self.claims++;
                self.step = DStep::kWritten;
                break;
            case DStep::kWritten:
            case DStep::kPending:
                settle(next, self);
                break;
            case DStep::kDead:
                if (rules_.take_back_dead) {
                    self.claims--;
                } else {
                    self.releases++;
                }
                self.step = DStep::kIdle;
                self.generation = 0;
                break;
        }
        visit(next, current_);
    }

    void expand_idle_decode(const State& state, std::size_t i) {
        const Decode& decode = state.decodes[i];
        for (std::uint8_t generation = 1; generation <= kLastGeneration; ++generation) {
            const bool same = decode.word_generation == generation;
            if ((!same && decode.held > 0) || (same && decode.claims == kMaxClaims)) {
                continue;
            }
            const bool live = state.generation == generation && state.slot != SlotState::kFree;
            if (rules_.look_before_write && !live) {
                continue;
            }
            State next = state;
            next.decodes[i].step = DStep::kLooked;
            next.decodes[i].generation = generation;
            visit(next, current_);
        }
        if (decode.held > 0) {
            State next = state;
            next.decodes[i].held--;
            next.decodes[i].releases++;
            next.has_released = true;
            visit(next, current_);
        }
    }

    void settle(State& state, Decode& self) {
        auto result = mc2::lease::verdict_on_claim(
            mc2::lease::pack_state(state.generation, state.slot), self.generation);
        if (result == ClaimResult::kPending && !rules_.wait_for_verdict) {
            result = ClaimResult::kHeld;
        }
        switch (result) {
            case ClaimResult::kPending:
                self.step = DStep::kPending;
                break;
            case ClaimResult::kDead:
                self.step = DStep::kDead;
                break;
            case ClaimResult::kHeld:
                self.held++;
                self.step = DStep::kIdle;
                self.generation = 0;
                break;
        }
    }

    // Backwards from "no lease, P at rest": what is not reached has a lease that can never end.
    void check_every_lease_can_end() {
        std::vector<bool> reached(states_.size());
        std::vector<std::size_t> todo;
        for (std::size_t i = 0; i < states_.size(); ++i) {
            if (states_[i].slot == SlotState::kFree && states_[i].step == PStep::kIdle) {
                reached[i] = true;
                todo.push_back(i);
            }
        }
        std::size_t num_reached = todo.size();
        while (!todo.empty()) {
            const std::size_t state = todo.back();
            todo.pop_back();
            for (const std::size_t from : predecessors_[state]) {
                if (!reached[from]) {
                    reached[from] = true;
                    ++num_reached;
                    todo.push_back(from);
                }
            }
        }
        if (num_reached != states_.size()) {
            violation_ = "a lease that can never end";
        }
    }

    Rules rules_;
    std::string violation_;
    std::unordered_map<State, std::size_t, Hash, Equal> index_;
    std::vector<State> states_;
    std::vector<std::vector<std::size_t>> predecessors_;
    std::size_t current_ = 0;  // the state being expanded
};

MC2_TEST(protocol_holds_in_every_interleaving) {
    Model model(Rules{});
    CHECK_EQ(model.explore(), "");
    std::cout << model.num_states() << " states\n";
    CHECK(model.num_states() > 10'000);
}

MC2_TEST(without_the_second_look_it_breaks) {
    CHECK_EQ(Model(Rules{.second_look = false}).explore(), "freed while held");
}

MC2_TEST(without_waiting_for_the_verdict_it_breaks) {
    CHECK_EQ(Model(Rules{.wait_for_verdict = false}).explore(), "freed while held");
}

// Either rule alone keeps a ticket for a generation to come from ending it. The look is there for one more reason: without
// it such a claim would overwrite the record of a release that P has not seen yet, and the lease would wait for its time.
MC2_TEST(guessed_tickets_break_it_only_without_both_rules) {
    CHECK_EQ(Model(Rules{.look_before_write = false, .take_back_dead = false}).explore(),
             "ended as released, but nobody held and released it");
    CHECK_EQ(Model(Rules{.look_before_write = false}).explore(), "");
    CHECK_EQ(Model(Rules{.take_back_dead = false}).explore(), "");
}

}  // namespace
