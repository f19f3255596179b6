// Device memory of another process over the simulator: what is mapped and what is copied.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>

#include "ascend/address_probe.h"
#include "ascend/device_copy.h"
#include "ascend/device_import.h"
#include "ascend_fixture.h"

namespace {

using namespace mc2;
using ascend::AclError;
using ascend::DeviceCopier;
using ascend::DeviceImport;
using ascend::DeviceStrip;
using mc2::test::import_pool;
using mc2::test::kBlockBytes;
using mc2::test::kDevice;
using mc2::test::kKeyBytes;
using mc2::test::kPoolBytes;
using mc2::test::pattern;
using mc2::test::Segment;
using mc2::test::strip_of;
using mc2::test::World;
using mc2::test::world;

using Seconds = std::chrono::duration<double>;
using Ids = std::vector<std::int64_t>;

MC2_TEST(nobody_maps_before_being_admitted) {
    World& all = world();
    const auto before = all.simulator.live();
    CHECK_THROWS(AclError, import_pool());
    CHECK_THROWS(AclError, DeviceImport(all.acl, kDevice, {all.exporter.segments.back()}));
    CHECK(all.simulator.live() == before);
    all.exporter.admit(all.acl->bare_tgid());
    all.exporter.admit(all.acl->bare_tgid());
    DeviceImport imported = import_pool();
    CHECK_EQ(imported.num_bytes(), kPoolBytes);
    imported.close();
    CHECK(all.simulator.live() == before);
}

MC2_TEST(neighbours_are_mapped_side_by_side) {
    World& all = world();
    std::vector<Segment> segments = all.exporter.segments;
    std::ranges::reverse(segments);
    DeviceImport imported(all.acl, kDevice, segments);
    CHECK_EQ(imported.num_mappings(), 2U);
    CHECK_EQ(imported.num_bytes(), kPoolBytes + kKeyBytes);
    const std::uintptr_t base = all.exporter.pool;
    const std::uintptr_t ours = imported.translate(base, kPoolBytes);
    CHECK_EQ(imported.translate(base + kBlockBytes[0] - 1, 2), ours + kBlockBytes[0] - 1);
    CHECK_THROWS(std::invalid_argument, imported.translate(base, kPoolBytes + 1));
    CHECK_THROWS(std::invalid_argument, imported.translate(base - 1, 2));
    CHECK_THROWS(std::invalid_argument, imported.translate(base, 0));
    CHECK_THROWS(std::invalid_argument,
                 imported.translate(std::numeric_limits<std::uintptr_t>::max(), 2));
    const Segment& key = all.exporter.segments.back();
    CHECK(imported.translate(key.base, kKeyBytes) != 0);
    // Without the block in the middle the others are no neighbours.
    const DeviceImport apart(all.acl, kDevice,
                             {all.exporter.segments.front(), all.exporter.segments[2]});
    CHECK_EQ(apart.num_mappings(), 2U);
    CHECK_THROWS(std::invalid_argument, apart.translate(base, kBlockBytes[0] + 1));
    CHECK(apart.translate(all.exporter.segments[2].base, kBlockBytes[2]) != 0);
    imported.close();
    imported.close();
    CHECK_THROWS(std::invalid_argument, imported.translate(base, 1));
}

MC2_TEST(hostile_segments_are_refused) {
    World& all = world();
    const auto before = all.simulator.live();
    const std::int64_t num_imports = all.simulator.calls("aclrtMemImportFromShareableHandleV2");
    const Segment good = all.exporter.segments.front();
    const auto refused = [&](const std::vector<Segment>& segments) {
        CHECK_THROWS(std::invalid_argument, DeviceImport(all.acl, kDevice, segments));
    };
    const auto changed = [&](auto change) {
        Segment segment = good;
        change(segment);
        refused({segment});
    };
    refused({});
    refused({good, good});
    changed([](Segment& s) { s.num_bytes = 0; });
    changed([](Segment& s) { s.num_bytes = 4096; });
    changed([](Segment& s) { s.num_bytes = std::numeric_limits<std::size_t>::max() - 1; });
    changed([](Segment& s) { s.num_bytes = std::size_t{1} << 47U; });
    changed([](Segment& s) { s.base = 0; });
    changed([](Segment& s) { s.base += 4096; });
    changed([](Segment& s) { s.base = ~std::uintptr_t{0} - kHugePageBytes + 1; });
    changed([](Segment& s) { s.handle.pop_back(); });
    changed([](Segment& s) { s.handle.clear(); });
    changed([](Segment& s) { s.kind = ascend::SegmentKind::kFabric; });
    changed([](Segment& s) { s.kind = ascend::SegmentKind::kIpcKey; });
    Segment other = good;
    other.handle[0] = static_cast<char>(other.handle[0] ^ 1);
    other.num_bytes *= 2;
    refused({good, other});
    refused(std::vector<Segment>(ascend::kMaxSegments + 1, good));
    CHECK_THROWS(std::invalid_argument, ascend::segment_kind_of("handle_v3"));
    CHECK_EQ(all.simulator.calls("aclrtMemImportFromShareableHandleV2"), num_imports);
    // Right in form and false: only the driver can tell, and nothing stays mapped.
    other.num_bytes = good.num_bytes;
    other.base += kPoolBytes;
    CHECK_THROWS(AclError, DeviceImport(all.acl, kDevice, {good, other}));
    Segment larger = good;
    larger.num_bytes *= 2;
    CHECK_THROWS(AclError, DeviceImport(all.acl, kDevice, {larger}));
    CHECK(all.simulator.live() == before);
}

MC2_TEST(hostile_strips_are_refused) {
    World& all = world();
    DeviceImport imported = import_pool();
    const std::uintptr_t own = all.pool->address();
    const std::uintptr_t peer = all.exporter.pool;
    const auto make = [&](DeviceStrip strip, std::size_t num_dst, std::size_t num_src) {
        const DeviceCopier copier(all.acl, kDevice, imported.share(), {strip}, num_dst, num_src, 2);
    };
    const DeviceStrip good = strip_of(own, 64, peer, 64, 64);
    make(good, 4, kPoolBytes / 64);
    CHECK_THROWS(std::invalid_argument, make(good, 4, kPoolBytes / 64 + 1));
    CHECK_THROWS(std::invalid_argument, make(good, 0, 4));
    CHECK_THROWS(std::invalid_argument, make(good, std::size_t{1} << 60U, 4));
    CHECK_THROWS(std::invalid_argument, make(good, 4, std::size_t{1} << 60U));
    CHECK_THROWS(std::invalid_argument, make(strip_of(own, 32, peer, 64, 64), 4, 4));
    CHECK_THROWS(std::invalid_argument, make(strip_of(own, 64, peer, 0, 64), 4, 4));
    CHECK_THROWS(std::invalid_argument, make(strip_of(own, 64, peer, 64, 0), 4, 4));
    CHECK_THROWS(std::invalid_argument, make(strip_of(0, 64, peer, 64, 64), 4, 4));
    CHECK_THROWS(std::invalid_argument, make(strip_of(own, 64, peer + kPoolBytes, 64, 64), 4, 1));
    CHECK_THROWS(std::invalid_argument, make(strip_of(own, 64, peer, ~std::size_t{0}, 64), 4, 4));
    CHECK_THROWS(std::invalid_argument,
                 make(strip_of(~std::uintptr_t{0} - 64, 64, peer, 64, 64), 4, 4));
}

MC2_TEST(bad_ids_move_no_byte) {
    World& all = world();
    DeviceImport imported = import_pool();
    const DeviceStrip strip = strip_of(all.pool->address(), 64, all.exporter.pool, 64, 64);
    DeviceCopier copier(all.acl, kDevice, imported.share(), {strip}, 8, 4, 2);
    const std::int64_t num_copies = all.simulator.calls("aclrtMemcpyAsync");
    const auto refused = [&](const Ids& dst, const Ids& src, double timeout = 1) {
        CHECK_THROWS(std::invalid_argument, copier.copy(dst, src, 1, Seconds(timeout)));
    };
    refused({0, 1}, {0, 4});
    refused({0, 8}, {0, 1});
    refused({0, -1}, {0, 1});
    refused({0, 1}, {0, std::numeric_limits<std::int64_t>::min()});
    refused({0, 0}, {0, 1});
    refused({0, 1}, {0});
    refused({0}, {0}, 0);
    refused({0}, {0}, -1);
    refused({0}, {0}, std::nan(""));
    refused({0}, {0}, std::numeric_limits<double>::infinity());
    CHECK_EQ(all.simulator.calls("aclrtMemcpyAsync"), num_copies);
    CHECK_EQ(copier.copy(Ids{}, Ids{}, 1, Seconds(1)), 0U);
    copier.close();
    copier.close();
    refused({0}, {0});
}

// One strip in each half of the own pool, spread as the strides say.
struct Round {
    std::vector<DeviceStrip> strips;
    std::size_t num_dst;
    std::size_t num_src;
    Ids dst;
    Ids src;
};

Round random_round(std::mt19937& random, std::uintptr_t own, std::uintptr_t peer) {
    const auto below = [&](std::size_t limit) { return std::size_t{random() % limit}; };
    Round round{
        .strips = {}, .num_dst = 1 + below(60), .num_src = 1 + below(60), .dst = {}, .src = {}};
    for (const std::size_t half : {std::size_t{0}, kPoolBytes / 2}) {
        const std::size_t num_bytes = 64 * (1 + below(32));
        const bool is_dense = below(2) == 0;
        const std::size_t own_stride = num_bytes + (is_dense ? 0 : 64 * below(16));
        const std::size_t peer_stride = num_bytes + (is_dense ? 0 : 64 * below(16));
        // Close to the seams between blocks, where a mistake would show.
        const std::size_t peer_offset = kBlockBytes[0] - 64 * below(64);
        round.strips.push_back(strip_of(own + half + 64 * below(64), own_stride, peer + peer_offset,
                                        peer_stride, num_bytes));
    }
    Ids places(round.num_dst);
    std::iota(places.begin(), places.end(), 0);
    if (below(2) == 0) {
        std::ranges::shuffle(places, random);
    }
    const std::size_t count = below(round.num_dst + 1);
    round.dst.assign(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(count));
    const std::size_t start = below(round.num_src);
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t id = below(4) == 0 ? below(round.num_src) : (start + i) % round.num_src;
        round.src.push_back(static_cast<std::int64_t>(id));
    }
    return round;
}

MC2_TEST(random_copies_are_equal) {
    World& all = world();
    DeviceImport imported = import_pool();
    const std::uintptr_t own = all.pool->address();
    const std::uintptr_t peer = all.exporter.pool;
    const std::vector<std::uint8_t> theirs = pattern(kPoolBytes, 1);
    std::vector<std::uint8_t> expected = pattern(kPoolBytes, 3);
    all.simulator.write(own, expected);
    std::mt19937 random(20);  // NOLINT(bugprone-random-generator-seed): reproducible
    for (int i = 0; i < 60; ++i) {
        const Round round = random_round(random, own, peer);
        DeviceCopier copier(all.acl, kDevice, imported.share(), round.strips, round.num_dst,
                            round.num_src, 1 + random() % 5);
        std::size_t num_bytes = 0;
        for (const DeviceStrip& strip : round.strips) {
            for (std::size_t b = 0; b < round.dst.size(); ++b) {
                const auto dst = static_cast<std::size_t>(round.dst[b]) * strip.own_stride;
                const auto src = static_cast<std::size_t>(round.src[b]) * strip.peer_stride;
                std::memcpy(&expected[strip.own_address - own + dst],
                            &theirs[strip.peer_address - peer + src], strip.num_bytes);
                num_bytes += strip.num_bytes;
            }
        }
        CHECK_EQ(copier.copy(round.dst, round.src, 1 + random() % 4, Seconds(30)), num_bytes);
        CHECK(all.simulator.read(own, kPoolBytes) == expected);
        copier.close();
    }
}

MC2_TEST(runs_are_one_call) {
    World& all = world();
    DeviceImport imported = import_pool();
    const DeviceStrip dense = strip_of(all.pool->address(), 4096, all.exporter.pool, 4096, 4096);
    DeviceStrip spread = dense;
    spread.own_stride = 8192;
    const auto calls_for = [&](const DeviceStrip& strip, const Ids& dst, const Ids& src) {
        DeviceCopier copier(all.acl, kDevice, imported.share(), {strip}, 16, 16, 4);
        const std::int64_t before = all.simulator.calls("aclrtMemcpyAsync");
        copier.copy(dst, src, 1, Seconds(10));
        return all.simulator.calls("aclrtMemcpyAsync") - before;
    };
    CHECK_EQ(calls_for(dense, {3, 4, 5, 6}, {8, 9, 10, 11}), 1);
    CHECK_EQ(calls_for(dense, {3, 4, 5, 6}, {8, 9, 12, 13}), 2);
    CHECK_EQ(calls_for(dense, {6, 5}, {9, 8}), 2);
    CHECK_EQ(calls_for(spread, {3, 4, 5, 6}, {8, 9, 10, 11}), 4);
}

MC2_TEST(a_key_is_copied_from) {
    World& all = world();
    const Segment& key = all.exporter.segments.back();
    DeviceImport imported(all.acl, kDevice, {key});
    const DeviceStrip strip = strip_of(all.pool->address(), 4096, key.base, 4096, 4096);
    DeviceCopier copier(all.acl, kDevice, imported.share(), {strip}, kKeyBytes / 4096,
                        kKeyBytes / 4096, 2);
    copier.copy(Ids{0}, Ids{kKeyBytes / 4096 - 1}, 1, Seconds(10));
    const std::vector<std::uint8_t> theirs = pattern(kKeyBytes, 2);
    const std::vector<std::uint8_t> last(theirs.end() - 4096, theirs.end());
    CHECK(all.simulator.read(all.pool->address(), 4096) == last);
}

MC2_TEST(copiers_keep_the_mapping) {
    World& all = world();
    const auto before = all.simulator.live();
    {
        DeviceImport imported = import_pool();
        const auto copier_at = [&](std::size_t offset) {
            const DeviceStrip strip =
                strip_of(all.pool->address() + offset, 4096, all.exporter.pool, 4096, 4096);
            return std::make_unique<DeviceCopier>(all.acl, kDevice, imported.share(),
                                                  std::vector{strip}, 16, 16, 3);
        };
        std::array<std::unique_ptr<DeviceCopier>, 2> copiers = {copier_at(0),
                                                                copier_at(kPoolBytes / 2)};
        std::vector<std::jthread> threads;
        threads.reserve(4);
        for (int i = 0; i < 4; ++i) {
            threads.emplace_back([&copier = *copiers[static_cast<std::size_t>(i) % 2]] {
                for (int round = 0; round < 20; ++round) {
                    copier.copy(Ids{0, 5, 2}, Ids{1, 4, 3}, 2, Seconds(30));
                }
            });
        }
        imported.close();
        threads.clear();
        CHECK_EQ(all.simulator.live().at("imports"), before.at("imports") + 3);
        copiers[0]->close();
        CHECK_EQ(all.simulator.live().at("imports"), before.at("imports") + 3);
        copiers[1]->close();
        CHECK(all.simulator.live() == before);
    }
    CHECK(all.simulator.live() == before);
}

MC2_TEST(own_and_peer_memory_in_one_range) {
    World& all = world();
    const auto before = all.simulator.live();
    const std::vector<Segment> peer(all.exporter.segments.begin(), all.exporter.segments.end() - 1);
    CHECK_THROWS(AclError, ascend::AddressProbe(all.acl, kDevice, kHugePageBytes, peer));
    CHECK_THROWS(std::invalid_argument, ascend::AddressProbe(all.acl, kDevice, 4096, peer));
    CHECK_THROWS(std::invalid_argument,
                 ascend::AddressProbe(all.acl, kDevice, kHugePageBytes, all.exporter.segments));
    CHECK(all.simulator.live() == before);
    ::setenv("MC2_ACL_SIM_MIXED", "1", 1);  // NOLINT(concurrency-mt-unsafe): no other thread asks
    {
        ascend::AddressProbe probe(all.acl, kDevice, kHugePageBytes, peer);
        CHECK_EQ(probe.peer_bytes(), kPoolBytes);
        CHECK(all.simulator.live() != before);
        probe.close();
        probe.close();
    }
    ::unsetenv("MC2_ACL_SIM_MIXED");  // NOLINT(concurrency-mt-unsafe): as above
    CHECK(all.simulator.live() == before);
}

MC2_TEST(what_a_library_cannot_tell) {
    const World& all = world();
    CHECK(all.acl->has("aclrtMemcpyAsync"));
    CHECK(!all.acl->has("aclrtNoSuchCall"));
    CHECK_EQ(all.acl->num_devices(), 2U);
    CHECK(all.acl->device_info(0, 402).has_value());
    CHECK(!all.acl->device_info(0, 999999).has_value());
    CHECK_THROWS(AclError, all.acl->device_info(99, 402));
    CHECK_THROWS(AclError, all.acl->set_device(99));
    CHECK(all.acl->version("runtime").has_value());
    CHECK_THROWS(std::system_error, ascend::Acl("no-such-library.so"));
    CHECK_THROWS(std::system_error, ascend::Acl("libc.so.6"));
    all.acl->set_device(kDevice);
}

MC2_TEST(nothing_is_left) { test::check_nothing_is_left(); }

}  // namespace
