// What a hand-over costs and what a pool costs. Prints, never asserts: machines differ.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "lease/reader.h"
#include "lease/table.h"
#include "memory/address_range.h"
#include "memory/block_copy.h"
#include "memory/page.h"
#include "memory/parallel.h"
#include "memory/pool.h"

namespace {

using mc2::lease::LeaseReader;
using mc2::lease::LeaseTable;

double seconds_of(const std::function<void()>& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void report(const std::string& what, double seconds, double unit, const char* unit_name) {
    std::cout << what << ": " << seconds / unit << " " << unit_name << '\n';
}

void bench_leases(std::size_t num_blocks) {
    constexpr int kRounds = 20'000;
    constexpr double kNanosecond = 1e-9;
    LeaseTable table(64, 16384);
    LeaseReader reader(table.fd(), table.add_ledger().fd);
    std::vector<std::uint32_t> blocks(num_blocks);
    std::iota(blocks.begin(), blocks.end(), 0U);
    const mc2::lease::Offer offer{.token = {},
                                  .digest = {},
                                  .num_tokens = 16 * num_blocks,
                                  .block_ids = blocks,
                                  .timeout = std::chrono::seconds(30)};
    auto& claimant = reader.claimant();
    double publish = 0;
    double claim = 0;
    double copy = 0;
    double release = 0;
    double sweep = 0;
    for (int i = 0; i < kRounds; ++i) {
        mc2::lease::LeaseId id{};
        publish += seconds_of([&] { id = table.publish(offer).value(); });
        claim += seconds_of([&] { (void)claimant.claim(id.slot, id.generation); });
        copy += seconds_of([&] { (void)claimant.blocks(id.slot, id.generation); });
        release += seconds_of([&] { claimant.release(id.slot, id.generation); });
        sweep += seconds_of([&] { (void)table.sweep(); });
    }
    std::cout << num_blocks << " blocks\n";
    report("  publish", publish / kRounds, kNanosecond, "ns");
    report("  claim", claim / kRounds, kNanosecond, "ns");
    report("  blocks", copy / kRounds, kNanosecond, "ns");
    report("  release", release / kRounds, kNanosecond, "ns");
    report("  sweep that ends it", sweep / kRounds, kNanosecond, "ns");
}

void bench_pools() {
    constexpr double kMillisecond = 1e-3;
    constexpr std::size_t kBytes = std::size_t{1} << 30U;
    for (int round = 0; round < 2;
         ++round) {  // the first one also pays for what the hypervisor has not backed yet
        for (const auto& [name, mode] :
             {std::pair{"off", mc2::HugePages::kOff}, std::pair{"auto", mc2::HugePages::kAuto}}) {
            std::size_t huge_bytes = 0;
            report(std::string("1 GiB pool, huge pages ") + name, seconds_of([&, mode = mode] {
                       const mc2::Pool pool(kBytes, mode, "bench");
                       huge_bytes = pool.huge_bytes();
                   }),
                   kMillisecond, "ms");
            std::cout << "  of it in huge pages: " << (huge_bytes >> 20U) << " MiB\n";
        }
    }
    for (const auto mode : {mc2::HugePages::kOff, mc2::HugePages::kAuto}) {
        mc2::Pool pool(kBytes, mode, "bench");
        pool.seal();
        mc2::AddressRange range(kBytes);
        report("map and prefault 1 GiB of a peer", seconds_of([&] {
                   range.map_peer(0, pool.exported_fd(), 0, kBytes);
                   range.prefault(0, kBytes);
               }),
               kMillisecond, "ms");
    }
}

// 512 MiB of a peer's blocks, in no order, into blocks of our own; and the same bytes by memcpy, in turn, warm, same threads.
void bench_pull(std::size_t num_layers, std::size_t block_bytes, std::size_t num_threads) {
    constexpr std::size_t kBytes = std::size_t{512} << 20U;
    constexpr int kRounds = 15;
    const std::size_t num_blocks = kBytes / num_layers / block_bytes;
    mc2::Pool theirs(kBytes, mc2::HugePages::kAuto, "bench");
    mc2::Pool ours(kBytes, mc2::HugePages::kAuto, "bench");
    mc2::AddressRange own(kBytes);
    own.map_pool(0, ours, 0, kBytes);
    theirs.seal();
    mc2::AddressRange peer(kBytes);
    peer.map_peer(0, theirs.exported_fd(), 0, kBytes);
    std::vector<mc2::Strip> strips(num_layers);
    for (std::size_t layer = 0; layer < num_layers; ++layer) {
        const std::size_t offset = layer * num_blocks * block_bytes;
        strips[layer] = {.dst = own.address() + offset,
                         .dst_stride = block_bytes,
                         .src_offset = offset,
                         .src_stride = block_bytes,
                         .num_bytes = block_bytes};
    }
    const mc2::BlockCopier copier(peer, strips, num_blocks, num_blocks);
    std::vector<std::int32_t> places(num_blocks);
    std::vector<std::int32_t> blocks(num_blocks);
    std::iota(places.begin(), places.end(), 0);
    for (std::size_t i = 0; i < num_blocks; ++i) {
        blocks[i] = static_cast<std::int32_t>(i * 7919 % num_blocks);
    }
    const auto pull = [&] { copier.copy(places, blocks, num_threads); };
    const auto memcpy_all = [&] {
        mc2::parallel_for(num_threads, num_threads, [&](std::size_t i) {
            const std::size_t part = kBytes / num_threads;
            std::memcpy(own.address() + i * part, peer.address() + i * part, part);
        });
    };
    std::vector<double> ratios;
    std::vector<double> pulls;
    for (int round = -1; round < kRounds; ++round) {
        const double first =
            seconds_of(round % 2 != 0 ? std::function(pull) : std::function(memcpy_all));
        const double second =
            seconds_of(round % 2 != 0 ? std::function(memcpy_all) : std::function(pull));
        if (round >= 0) {  // the first round touches the pages
            pulls.push_back(round % 2 != 0 ? first : second);
            ratios.push_back(round % 2 != 0 ? second / first : first / second);
        }
    }
    std::ranges::sort(ratios);
    std::ranges::sort(pulls);
    std::cout << "pull of 512 MiB, " << num_layers << " layers, blocks of " << (block_bytes >> 10U)
              << " KiB, " << num_threads << " threads: " << pulls[kRounds / 2] * 1e3
              << " ms, speed of memcpy's " << ratios[kRounds / 2] << " (" << ratios[1] << " to "
              << ratios[kRounds - 2] << ")\n";
}

}  // namespace

int main() {
    bench_leases(1);
    bench_leases(8192);
    bench_pools();
    for (const std::size_t num_threads : {std::size_t{1}, std::size_t{2}}) {
        bench_pull(32, std::size_t{16} << 10U, num_threads);
        bench_pull(32, std::size_t{128} << 10U, num_threads);
        bench_pull(4, std::size_t{1} << 20U, num_threads);
    }
    return 0;
}
