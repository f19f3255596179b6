#include <csignal>
#include <limits>
#include <system_error>

#include "lease_fixture.h"
#include "memory/errors.h"

namespace {

using mc2::lease::ClaimResult;
using mc2::lease::EndedLease;
using mc2::lease::LeaseId;
using mc2::lease::LeaseTable;
using mc2::lease::Offer;
using mc2::lease::SlotState;
using mc2::lease::TestAccess;
using mc2::lease::Verdict;
using mc2::test::Decode;
using mc2::test::kForever;
using mc2::test::publish;

bool is_only(const std::vector<EndedLease>& ended, const LeaseId& id, Verdict reason) {
    return ended.size() == 1 && ended[0].id == id && ended[0].reason == reason;
}

MC2_TEST(publish_peek_claim_blocks_release) {
    LeaseTable table(4, 8);
    Decode decode(table);
    const auto id = publish(table, kForever, {5, 6, 4294967295U}).value();
    CHECK_EQ(id.generation, 1U);
    auto& claimant = decode.reader.claimant();
    const auto info = claimant.peek(id.slot, id.generation).value();
    CHECK(info.token == mc2::test::token(7) && info.digest == mc2::test::digest(7));
    CHECK(info.num_tokens == 30 && info.num_blocks == 3);
    CHECK_THROWS(std::invalid_argument, claimant.blocks(id.slot, id.generation));
    CHECK(decode.claim(id) == ClaimResult::kHeld);
    CHECK(claimant.blocks(id.slot, id.generation) ==
          (std::vector<std::uint32_t>{5, 6, 4294967295U}));
    CHECK(table.sweep().empty());
    const auto row = table.view(1).rows.at(0);
    CHECK(row.state == SlotState::kHeld && row.claims == 1 && row.releases == 0);
    CHECK_EQ(TestAccess::index(table).references(id.slot).load(), 2U);
    decode.release(id);
    CHECK_THROWS(std::invalid_argument, (decode.release(id), 0));
    CHECK_THROWS(std::invalid_argument, claimant.blocks(id.slot, id.generation));
    CHECK(is_only(table.sweep(), id, Verdict::kReleased));
    CHECK_EQ(table.num_active(), 0U);
    CHECK(!claimant.peek(id.slot, id.generation));
    CHECK(decode.claim(id) == ClaimResult::kDead);
}

MC2_TEST(a_block_table_is_in_the_readers_terms_or_none_at_all) {
    LeaseTable table(4, 8);
    Decode decode(table);
    const auto id = publish(table, kForever, {5, 0, 6}).value();
    auto& claimant = decode.reader.claimant();
    CHECK_THROWS(std::invalid_argument, claimant.block_table(id.slot, id.generation, 10, 7));
    CHECK(decode.claim(id) == ClaimResult::kHeld);
    CHECK(claimant.block_table(id.slot, id.generation, 10, 7) ==
          (std::vector<std::int32_t>{15, 10, 16}));
    CHECK_THROWS(std::invalid_argument, claimant.block_table(id.slot, id.generation, 10, 6));
    CHECK_THROWS(std::invalid_argument,
                 claimant.block_table(id.slot, id.generation, 2147483641, 7));
    decode.release(id);
    CHECK_THROWS(std::invalid_argument, claimant.block_table(id.slot, id.generation, 10, 7));
}

MC2_TEST(a_lease_over_blocks_that_the_pool_does_not_have_is_refused) {
    LeaseTable table(4, 8);
    const std::vector<std::uint32_t> ids{3, 7};
    const auto offer = [&ids](std::uint64_t num_pool_blocks) {
        return Offer{.token = mc2::test::token(7),
                     .digest = mc2::test::digest(7),
                     .num_tokens = 30,
                     .block_ids = ids,
                     .timeout = std::chrono::duration<double>(kForever),
                     .num_pool_blocks = num_pool_blocks};
    };
    CHECK_THROWS(std::invalid_argument, table.publish(offer(7)));
    CHECK_EQ(table.num_active(), 0U);
    CHECK(table.publish(offer(8)).has_value());
}

MC2_TEST(a_view_shows_the_oldest_first_and_who_holds_them) {
    LeaseTable table(4, 8);
    Decode first(table);
    const Decode idle(table);
    Decode second(table);
    const auto old = publish(table, kForever, {1, 2, 3}).value();
    const auto young = publish(table, 0.0, {4}).value();
    CHECK(first.claim(old) == ClaimResult::kHeld);
    CHECK(second.claim(old) == ClaimResult::kHeld);
    CHECK(second.claim(old) == ClaimResult::kHeld);
    second.release(old);
    const auto all = table.view(10);
    CHECK_EQ(all.num_leases, 2U);
    CHECK(all.rows.size() == 2 && all.rows[0].id == old && all.rows[1].id == young);
    CHECK(all.rows[0].claims == 3 && all.rows[0].releases == 1);
    const auto& holders = all.rows[0].holders;
    CHECK(holders.size() == 2);
    CHECK(holders[0].ledger_id == first.ledger.id && holders[0].claims == 1);
    CHECK(holders[1].ledger_id == second.ledger.id && holders[1].claims == 2);
    CHECK_EQ(holders[1].releases, 1U);
    CHECK(all.rows[0].verdict == Verdict::kKeep && all.rows[1].verdict == Verdict::kExpired);
    const auto one = table.view(1);
    CHECK(one.num_leases == 2 && one.rows.size() == 1);
    CHECK(one.rows[0].id == old);
    CHECK(is_only(table.sweep(), young, Verdict::kExpired));  // a view ends nothing, a sweep does
    table.drop_ledger(first.ledger.id);
    second.release(old);
    const auto dead = table.view(1).rows.at(0);
    CHECK(dead.verdict == Verdict::kPeerGone && dead.holders.size() == 1 && dead.claims == 3);
}

MC2_TEST(full_table_and_bad_offers) {
    LeaseTable table(2, 2);
    CHECK(publish(table, kForever, {1}) && publish(table, kForever, {}));
    CHECK(!publish(table, kForever, {1}));
    CHECK_THROWS(std::invalid_argument, publish(table, kForever, {1, 2, 3}));
    CHECK_THROWS(std::invalid_argument, publish(table, -1.0));
    CHECK_THROWS(std::invalid_argument, publish(table, std::numeric_limits<double>::quiet_NaN()));
    CHECK_THROWS(std::invalid_argument, LeaseTable(0, 1));
    CHECK_THROWS(std::invalid_argument, LeaseTable(1, 0));
    CHECK_THROWS(std::invalid_argument, LeaseTable(1U << 20U, 1U << 10U));
    CHECK_THROWS(std::invalid_argument, LeaseTable(~std::size_t{0}, ~std::size_t{0}));
    CHECK_THROWS(std::invalid_argument, LeaseTable(~std::size_t{0} / 128, 1));
}

MC2_TEST(offer_expires_only_unclaimed) {
    LeaseTable table(4, 8);
    Decode decode(table);
    const auto lost = publish(table, 0.0).value();
    const auto held = publish(table, 0.0).value();
    CHECK(decode.claim(held) == ClaimResult::kHeld);
    CHECK(is_only(table.sweep(), lost, Verdict::kExpired));
    CHECK(table.sweep().empty());
    CHECK(decode.claim(lost) == ClaimResult::kDead);
    decode.release(held);
    CHECK(is_only(table.sweep(), held, Verdict::kReleased));
}

MC2_TEST(two_decodes_share_a_lease) {
    LeaseTable table(4, 8);
    Decode first(table);
    Decode second(table);
    const auto id = publish(table, 0.0).value();
    CHECK(first.claim(id) == ClaimResult::kHeld);
    CHECK(second.claim(id) == ClaimResult::kHeld);
    first.release(id);
    CHECK(table.sweep().empty());
    CHECK(first.claim(id) == ClaimResult::kHeld);
    second.release(id);
    CHECK(table.sweep().empty());
    first.release(id);
    CHECK(is_only(table.sweep(), id, Verdict::kReleased));
}

MC2_TEST(one_decode_claims_twice) {
    LeaseTable table(4, 8);
    Decode decode(table);
    const auto id = publish(table, 0.0).value();
    CHECK(decode.claim(id) == ClaimResult::kHeld);
    CHECK(decode.claim(id) == ClaimResult::kHeld);
    decode.release(id);
    CHECK(table.sweep().empty());
    CHECK_EQ(table.view(1).rows.at(0).claims, 2U);
    decode.release(id);
    CHECK(is_only(table.sweep(), id, Verdict::kReleased));
}

MC2_TEST(claims_are_exhausted_at_16_bits) {
    LeaseTable table(1, 8);
    Decode decode(table);
    const auto id = publish(table, 0.0).value();
    for (int i = 0; i < 65535; ++i) {
        CHECK(decode.claim(id) == ClaimResult::kHeld);
    }
    CHECK(decode.claim(id) == ClaimResult::kDead);
    CHECK(table.sweep().empty());
    for (int i = 0; i < 65535; ++i) {
        decode.release(id);
    }
    CHECK(decode.claim(id) == ClaimResult::kDead);
    CHECK(is_only(table.sweep(), id, Verdict::kReleased));
    const auto next = publish(table, 0.0).value();
    CHECK(decode.claim(next) == ClaimResult::kHeld);  // a new generation starts counting anew
}

MC2_TEST(dropped_ledger_ends_only_its_own) {
    LeaseTable table(4, 8);
    Decode gone(table);
    Decode stays(table);
    const auto only_gone = publish(table, kForever).value();
    const auto both = publish(table, kForever).value();
    const auto untouched = publish(table, kForever).value();
    CHECK(gone.claim(only_gone) == ClaimResult::kHeld);
    CHECK(gone.claim(both) == ClaimResult::kHeld);
    CHECK(stays.claim(both) == ClaimResult::kHeld);
    table.drop_ledger(gone.ledger.id);
    CHECK_THROWS(std::invalid_argument, (table.drop_ledger(gone.ledger.id), 0));
    CHECK(is_only(table.sweep(), only_gone, Verdict::kPeerGone));
    stays.release(both);
    CHECK(is_only(table.sweep(), both, Verdict::kPeerGone));
    CHECK_EQ(table.num_active(), 1U);
    CHECK(stays.claim(untouched) == ClaimResult::kHeld);
}

MC2_TEST(released_before_drop_counts_as_released) {
    LeaseTable table(4, 8);
    Decode decode(table);
    const auto id = publish(table, kForever).value();
    CHECK(decode.claim(id) == ClaimResult::kHeld);
    decode.release(id);
    table.drop_ledger(decode.ledger.id);
    CHECK(is_only(table.sweep(), id, Verdict::kReleased));
}

MC2_TEST(reused_slot_is_another_lease) {
    LeaseTable table(1, 8);
    Decode decode(table);
    const auto old = publish(table, 0.0, {1}, 1).value();
    CHECK(decode.claim(old) == ClaimResult::kHeld);
    decode.release(old);
    CHECK_EQ(table.sweep().size(), 1U);
    const auto fresh = publish(table, kForever, {2}, 2).value();
    CHECK(fresh.slot == old.slot && fresh.generation == old.generation + 1);
    CHECK(decode.claim(old) == ClaimResult::kDead);
    CHECK(!decode.reader.claimant().peek(old.slot, old.generation));
    CHECK(table.sweep().empty());  // the dead claim ended nobody's lease
    CHECK(decode.claim(fresh) == ClaimResult::kHeld);
    CHECK(decode.claim(old) == ClaimResult::kDead);
    CHECK(decode.reader.claimant().blocks(fresh.slot, fresh.generation) ==
          std::vector<std::uint32_t>{2});
    CHECK(table.sweep().empty());
}

MC2_TEST(ticket_of_the_future_leaves_no_trace) {
    LeaseTable table(1, 8);
    Decode decode(table);
    CHECK(decode.claim({.slot = 0, .generation = 1}) == ClaimResult::kDead);
    const auto id = publish(table, kForever).value();
    CHECK_EQ(id.generation, 1U);
    CHECK(table.sweep().empty());
    CHECK_EQ(table.view(1).rows.at(0).claims, 0U);
    CHECK(decode.reader.claimant().claim(0, (std::uint64_t{1} << 32U) + 1) == ClaimResult::kDead);
    CHECK(decode.reader.claimant().claim(1, 1) == ClaimResult::kDead);
    CHECK(!decode.reader.claimant().peek(~std::uint64_t{0}, 1));
}

MC2_TEST(generation_wraps_over_zero) {
    LeaseTable table(1, 8);
    Decode decode(table);
    TestAccess::set_generation(table, 0, std::numeric_limits<std::uint32_t>::max() - 1);
    const auto last = publish(table, 0.0).value();
    CHECK_EQ(last.generation, std::numeric_limits<std::uint32_t>::max());
    CHECK(decode.claim(last) == ClaimResult::kHeld);
    decode.release(last);
    CHECK_EQ(table.sweep().size(), 1U);
    CHECK_EQ(publish(table, 0.0).value().generation, 1U);
}

// P is stopped between EXPIRING and its verdict: written by hand, as no call stops there.
MC2_TEST(pending_claim_waits_for_the_verdict) {
    LeaseTable table(1, 8);
    Decode decode(table);
    const auto id = publish(table, kForever).value();
    const auto state = TestAccess::index(table).state(0);
    const auto write = [&](SlotState value) {
        state.store(mc2::lease::pack_state(id.generation, value));
    };
    auto& claimant = decode.reader.claimant();
    CHECK_THROWS(std::invalid_argument, claimant.poll(id.slot, id.generation));
    write(SlotState::kExpiring);
    CHECK(claimant.peek(id.slot, id.generation).has_value());
    CHECK(decode.claim(id) == ClaimResult::kPending);
    CHECK(decode.claim(id) == ClaimResult::kPending);
    CHECK_THROWS(std::invalid_argument, claimant.blocks(id.slot, id.generation));
    CHECK(claimant.poll(id.slot, id.generation) == ClaimResult::kPending);
    write(SlotState::kHeld);
    CHECK(claimant.poll(id.slot, id.generation) == ClaimResult::kHeld);
    write(SlotState::kFree);
    CHECK(claimant.poll(id.slot, id.generation) == ClaimResult::kDead);
    CHECK_THROWS(std::invalid_argument, claimant.poll(id.slot, id.generation));
    write(SlotState::kHeld);
    CHECK_EQ(table.view(1).rows.at(0).claims, 1U);  // the dead one was taken back
    decode.release(id);
    CHECK(is_only(table.sweep(), id, Verdict::kReleased));
}

MC2_TEST(writes_of_the_wrong_side_fault) {
    LeaseTable table(2, 4);
    CHECK_EQ(mc2::test::signal_of_child([&] {
                 const Decode decode(table);
                 mc2::lease::open_segment(table.fd(), mc2::lease::kIndexMagic,
                                          mc2::Access::kReadOnly)
                     .mapping.data()[64] = std::byte{1};
             }),
             SIGSEGV);
    CHECK_THROWS(
        std::invalid_argument,
        mc2::lease::open_segment(table.fd(), mc2::lease::kIndexMagic, mc2::Access::kReadWrite));
}

MC2_TEST(closed_objects_refuse) {
    LeaseTable table(2, 4);
    Decode decode(table);
    const auto id = publish(table, kForever).value();
    CHECK(decode.claim(id) == ClaimResult::kHeld);
    table.close();
    table.close();
    CHECK_THROWS(std::invalid_argument, table.fd());
    CHECK_THROWS(std::invalid_argument, publish(table, kForever));
    CHECK_THROWS(std::invalid_argument, table.sweep());
    CHECK_THROWS(std::invalid_argument, table.add_ledger());
    CHECK_THROWS(std::invalid_argument, (table.drop_ledger(decode.ledger.id), 0));
    CHECK_EQ(decode.reader.claimant().blocks(id.slot, id.generation).size(), 3U);
    decode.reader.close();
    decode.reader.close();
    CHECK_THROWS(std::invalid_argument, decode.reader.claimant());
}

}  // namespace
