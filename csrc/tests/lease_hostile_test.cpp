// Segments made by somebody who wants the reader, or prefill, to go astray.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <limits>

#include "lease_fixture.h"
#include "memory/errors.h"
#include "memory/file_descriptor.h"

namespace {

using mc2::Access;
using mc2::FileDescriptor;
using mc2::Mapping;
using mc2::lease::ClaimResult;
using mc2::lease::Geometry;
using mc2::lease::Header;
using mc2::lease::LeaseReader;
using mc2::lease::LeaseTable;
using mc2::lease::Words;
using mc2::test::Decode;
using mc2::test::kForever;

constexpr std::size_t kNumSlots = 4;
constexpr std::size_t kMaxBlocks = 40;
constexpr std::uint64_t kTableId = 99;

// Index and ledger as a correct P makes them, but open to forgery.
struct Forgery {
    Geometry index_geometry = Geometry::of_index(kNumSlots, kMaxBlocks, kTableId);
    Geometry ledger_geometry = Geometry::of_ledger(kNumSlots, kTableId);
    FileDescriptor index = file_of(index_geometry);
    FileDescriptor ledger = file_of(ledger_geometry);

    static FileDescriptor file_of(const Geometry& geometry) {
        FileDescriptor file = mc2::make_memfd("forged", geometry.total_bytes, false);
        mc2::add_seals(file.get(), F_SEAL_SHRINK);
        write_header(file, {.magic = geometry.magic,
                            .version = mc2::lease::kVersion,
                            .table_id = geometry.table_id,
                            .num_slots = geometry.num_slots,
                            .max_blocks = geometry.max_blocks,
                            .slot_stride = geometry.slot_stride,
                            .total_bytes = geometry.total_bytes,
                            .reserved = 0});
        return file;
    }
    static void write_header(const FileDescriptor& file, const Header& header) {
        CHECK_EQ(::pwrite(file.get(), &header, sizeof(header), 0),
                 static_cast<ssize_t>(sizeof(header)));
    }
    static Header read_header(const FileDescriptor& file) {
        Header header{};
        CHECK_EQ(::pread(file.get(), &header, sizeof(header), 0),
                 static_cast<ssize_t>(sizeof(header)));
        return header;
    }
    [[nodiscard]] LeaseReader open() const { return {index.get(), ledger.get()}; }
};

MC2_TEST(unforged_segments_open) {
    const Forgery forgery;
    const LeaseReader reader = forgery.open();
    CHECK(reader.num_slots() == kNumSlots && reader.max_blocks() == kMaxBlocks);
}

MC2_TEST(every_header_field_is_checked) {
    constexpr auto kHuge = std::numeric_limits<std::uint64_t>::max();
    for (const bool forge_index : {true, false}) {
        for (std::size_t field = 0; field < offsetof(Header, reserved) / 8; ++field) {
            for (const std::uint64_t value :
                 {std::uint64_t{0}, std::uint64_t{5}, kHuge, kHuge / sizeof(Header) + 1,
                  std::uint64_t{1} << 32U}) {
                const Forgery forgery;
                const FileDescriptor& file = forge_index ? forgery.index : forgery.ledger;
                Header header = Forgery::read_header(file);
                std::array<std::uint64_t, sizeof(Header) / 8> words{};
                std::memcpy(words.data(), &header, sizeof(header));
                if (words[field] == value) {
                    continue;
                }
                words[field] = value;
                std::memcpy(&header, words.data(), sizeof(header));
                Forgery::write_header(file, header);
                CHECK_THROWS(std::invalid_argument, forgery.open());
            }
        }
    }
}

MC2_TEST(wrong_files_are_refused) {
    const Forgery forgery;
    CHECK_THROWS(std::invalid_argument, LeaseReader(forgery.ledger.get(), forgery.index.get()));
    CHECK_THROWS(std::invalid_argument, LeaseReader(-1, forgery.ledger.get()));
    CHECK_THROWS(std::invalid_argument, LeaseReader(forgery.index.get(), -1));
    const FileDescriptor unsealed = mc2::make_memfd("forged", 4096, false);
    CHECK_THROWS(std::invalid_argument, LeaseReader(unsealed.get(), forgery.ledger.get()));
    const FileDescriptor empty = mc2::make_memfd("forged", 0, false);
    mc2::add_seals(empty.get(), F_SEAL_SHRINK);
    CHECK_THROWS(std::invalid_argument, LeaseReader(empty.get(), forgery.ledger.get()));
    const FileDescriptor device(::open("/dev/zero", O_RDWR | O_CLOEXEC));
    CHECK_THROWS(std::invalid_argument, LeaseReader(device.get(), forgery.ledger.get()));
    mc2::add_seals(forgery.ledger.get(), F_SEAL_WRITE);
    CHECK_THROWS(std::invalid_argument, forgery.open());
}

MC2_TEST(used_ledger_is_refused) {
    LeaseTable table(kNumSlots, kMaxBlocks);
    Decode decode(table);
    const auto id = mc2::test::publish(table, kForever).value();
    CHECK(decode.claim(id) == ClaimResult::kHeld);
    CHECK_THROWS(std::invalid_argument, LeaseReader(table.fd(), decode.ledger.fd));
}

MC2_TEST(block_count_beyond_the_slot_is_refused) {
    const Forgery forgery;
    LeaseReader reader = forgery.open();
    const Mapping mapping = Mapping::of_file(
        forgery.index.get(), forgery.index_geometry.total_bytes, Access::kReadWrite);
    const Words words(mapping, forgery.index_geometry);
    words.num_blocks(3).store(kMaxBlocks + 1);
    words.state(3).store(mc2::lease::pack_state(1, mc2::lease::SlotState::kOffered));
    CHECK(!reader.claimant().peek(3, 1));
    CHECK(reader.claimant().claim(3, 1) == ClaimResult::kHeld);
    CHECK_THROWS(std::invalid_argument, reader.claimant().blocks(3, 1));
    words.num_blocks(3).store(kMaxBlocks);
    CHECK_EQ(reader.claimant().blocks(3, 1).size(), kMaxBlocks);
}

MC2_TEST(unknown_state_is_dead) {
    const Forgery forgery;
    LeaseReader reader = forgery.open();
    const Mapping mapping = Mapping::of_file(
        forgery.index.get(), forgery.index_geometry.total_bytes, Access::kReadWrite);
    const Words words(mapping, forgery.index_geometry);
    words.state(0).store(std::uint64_t{1} << 32U | 0xFFU);
    CHECK(!reader.claimant().peek(0, 1));
    CHECK(reader.claimant().claim(0, 1) == ClaimResult::kDead);
}

// A decode that writes nonsense harms its own claims only.
MC2_TEST(nonsense_in_a_ledger_ends_no_other_claim) {
    LeaseTable table(kNumSlots, kMaxBlocks);
    Decode honest(table);
    const Decode hostile(table);
    const auto id = mc2::test::publish(table, 0.0).value();
    CHECK(honest.claim(id) == ClaimResult::kHeld);
    const auto ledger = mc2::lease::TestAccess::writable_ledger(table, hostile.ledger.id);
    ledger.ledger(id.slot).store(std::uint64_t{id.generation} << 32U | 0x0000'FFFFU);
    CHECK(table.sweep().empty());
    ledger.ledger(id.slot).store(~std::uint64_t{0});
    CHECK(table.sweep().empty());
    honest.release(id);
    CHECK_EQ(table.sweep().size(), 1U);
}

}  // namespace
