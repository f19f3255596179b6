// What is told and what is left when a call to the simulator fails.
#include <algorithm>

#include "ascend/device_copy.h"
#include "ascend/device_import.h"
#include "ascend_fixture.h"

namespace {

using namespace mc2;
using ascend::AclError;
using ascend::DeviceCopier;
using ascend::DeviceExport;
using ascend::DeviceImport;
using ascend::DeviceStrip;
using mc2::test::DevicePool;
using mc2::test::import_pool;
using mc2::test::kBlockBytes;
using mc2::test::kDevice;
using mc2::test::kKeyBytes;
using mc2::test::kPoolBytes;
using mc2::test::strip_of;
using mc2::test::World;
using mc2::test::world;

using Seconds = std::chrono::duration<double>;
using Ids = std::vector<std::int64_t>;
constexpr int kFault = 507899;

// close() until it works, as its users do; how often it threw.
template <typename Closable>
int close_fully(Closable& closable) {
    int num_failures = 0;
    for (; num_failures < 10; ++num_failures) {
        try {
            closable.close();
            return num_failures;
        } catch (const AclError&) {  // NOLINT(bugprone-empty-catch): counted
        }
    }
    return num_failures;
}

// Everything once, with what the caller does about a failure; whether anything threw.
bool run_importer() {
    World& all = world();
    bool has_thrown = false;
    try {
        DeviceImport imported(all.acl, kDevice, all.exporter.segments);
        const DeviceStrip strip =
            strip_of(all.pool->address(), 4096, all.exporter.pool, 8192, 2048);
        DeviceStrip other = strip;
        other.own_address += kPoolBytes / 2;
        DeviceCopier copier(all.acl, kDevice, imported.share(), {strip, other}, 8, 8, 3);
        try {
            copier.copy(Ids{0, 1, 2, 7}, Ids{3, 4, 5, 0}, 2, Seconds(10));
        } catch (const AclError&) {
            has_thrown = true;
            // Nothing of the failure is left for the next one.
            copier.copy(Ids{0, 1, 2, 7}, Ids{3, 4, 5, 0}, 2, Seconds(10));
        }
        has_thrown |= close_fully(copier) > 0;
        has_thrown |= close_fully(imported) > 0;
    } catch (const AclError&) {
        has_thrown = true;
    }
    return has_thrown;
}

bool run_exporter(const DevicePool& pool, std::uintptr_t plain) {
    World& all = world();
    bool has_thrown = false;
    try {
        DeviceExport exported(all.acl, kDevice);
        exported.admit(77);
        try {
            CHECK_EQ(exported.add_allocation(pool.address(), kPoolBytes, false).size(),
                     kBlockBytes.size());
        } catch (const AclError&) {
            has_thrown = true;
            CHECK_EQ(exported.num_segments(), 0U);
            CHECK_EQ(exported.add_allocation(pool.address(), kPoolBytes, false).size(),
                     kBlockBytes.size());
        }
        exported.add_key(plain, kKeyBytes);
        exported.admit(78);
        has_thrown |= close_fully(exported) > 0;
    } catch (const AclError&) {
        has_thrown = true;
    }
    return has_thrown;
}

// Fails every one of the calls in turn, until a run comes through.
template <typename Run>
void fail_in_turn(const char* call, const Run& run) {
    int skip = 0;
    while (skip < 100 && run([&] { world().simulator.fail(call, skip, kFault, 1); })) {
        ++skip;
    }
    if (skip == 0 || skip == 100) {
        test::fail(__FILE__, __LINE__,
                   std::string(call) + " failed " + std::to_string(skip) + " times");
    }
}

MC2_TEST(every_failing_call_of_an_importer_is_told) {
    const World& all = world();
    all.exporter.admit(all.acl->bare_tgid());
    for (const char* call :
         {"aclrtSetDevice", "aclrtReserveMemAddress", "aclrtMemImportFromShareableHandleV2",
          "aclrtMapMem", "aclrtIpcMemImportByKey", "aclrtCreateStream", "aclrtMemcpyAsync",
          "copy-task", "aclrtSynchronizeStreamWithTimeout", "aclrtDestroyStream", "aclrtUnmapMem",
          "aclrtFreePhysical", "aclrtReleaseMemAddress", "aclrtIpcMemClose"}) {
        fail_in_turn(call, [&](const auto& inject) {
            const auto before = all.simulator.live();
            inject();
            const bool has_thrown = run_importer();
            all.simulator.clear_faults();
            CHECK(all.simulator.live() == before);
            return has_thrown;
        });
    }
    CHECK_EQ(all.simulator.violations(), 0);
}

MC2_TEST(memory_outlives_its_mapping) {
    const World& all = world();
    DeviceImport imported = import_pool();
    const std::int64_t num_freed = all.simulator.calls("aclrtFreePhysical");
    const std::int64_t num_released = all.simulator.calls("aclrtReleaseMemAddress");
    all.simulator.fail("aclrtUnmapMem", 1, kFault, 1);
    bool has_thrown = false;
    try {
        imported.close();
    } catch (const AclError&) {
        has_thrown = true;
    }
    CHECK(has_thrown);
    CHECK_EQ(all.simulator.calls("aclrtFreePhysical"), num_freed + 2);
    CHECK_EQ(all.simulator.calls("aclrtReleaseMemAddress"), num_released);
    imported.close();
    CHECK_EQ(all.simulator.calls("aclrtFreePhysical"), num_freed + 3);
    CHECK_EQ(all.simulator.calls("aclrtReleaseMemAddress"), num_released + 1);
}

MC2_TEST(every_failing_call_of_an_exporter_is_told) {
    const World& all = world();
    const std::uintptr_t plain = all.simulator.malloc(kKeyBytes);
    for (const char* call : {"aclrtSetDevice", "aclrtMemGetAddressRange",
                             "aclrtMemRetainAllocationHandle", "aclrtMemExportToShareableHandleV2",
                             "aclrtMemSetPidToShareableHandleV2", "aclrtIpcMemGetExportKey",
                             "aclrtIpcMemSetImportPid", "aclrtIpcMemClose", "aclrtFreePhysical"}) {
        fail_in_turn(call, [&](const auto& inject) {
            const auto before = all.simulator.live();
            bool has_thrown = false;
            {
                // One of its own each time: ACL exports memory once.
                const DevicePool pool(all.acl, kDevice);
                inject();
                has_thrown = run_exporter(pool, plain);
                all.simulator.clear_faults();
            }
            CHECK(all.simulator.live() == before);
            return has_thrown;
        });
    }
    all.simulator.free(plain);
    CHECK_EQ(all.simulator.violations(), 0);
}

MC2_TEST(a_late_copy_writes_nothing_afterwards) {
    World& all = world();
    DeviceImport imported = import_pool();
    const DeviceStrip strip = strip_of(all.pool->address(), 8192, all.exporter.pool, 4096, 4096);
    DeviceCopier copier(all.acl, kDevice, imported.share(), {strip}, 8, 8, 2);
    all.simulator.set_copy_delay_us(50000);
    CHECK_THROWS(AclError, copier.copy(Ids{0, 1, 2, 3}, Ids{0, 1, 2, 3}, 1, Seconds(0.001)));
    all.simulator.set_copy_delay_us(0);
    CHECK_EQ(all.simulator.live().at("pending"), 0);
    CHECK_EQ(copier.copy(Ids{0, 1}, Ids{6, 7}, 1, Seconds(30)), 8192U);
}

MC2_TEST(streams_that_cannot_be_ended_are_tried_again) {
    World& all = world();
    DeviceImport imported = import_pool();
    const DeviceStrip strip = strip_of(all.pool->address(), 8192, all.exporter.pool, 4096, 4096);
    DeviceCopier copier(all.acl, kDevice, imported.share(), {strip}, 8, 8, 1);
    const auto streams = [&] { return all.simulator.live().at("streams"); };
    const std::int64_t before = streams();
    // Waiting fails twice, then force is used.
    all.simulator.fail("aclrtSynchronizeStreamWithTimeout", 0, kFault, 2);
    CHECK_THROWS(AclError, copier.copy(Ids{0}, Ids{0}, 1, Seconds(10)));
    CHECK_EQ(streams(), before);
    // And now not even force helps.
    all.simulator.fail("aclrtSynchronizeStreamWithTimeout", 0, kFault, 3);
    all.simulator.fail("aclrtDestroyStreamForce", 0, kFault, 2);
    try {
        copier.copy(Ids{0}, Ids{0}, 1, Seconds(10));
        CHECK(false);
    } catch (const AclError& error) {
        CHECK(std::string(error.what()).find("may still be writing") != std::string::npos);
    }
    CHECK_EQ(streams(), before + 1);
    CHECK_THROWS(AclError, copier.copy(Ids{0}, Ids{0}, 1, Seconds(10)));
    CHECK_EQ(streams(), before + 1);
    CHECK_EQ(copier.copy(Ids{0}, Ids{0}, 1, Seconds(10)), 4096U);
    all.simulator.clear_faults();
    copier.close();
    CHECK_EQ(streams(), before);
}

MC2_TEST(nothing_is_left) { test::check_nothing_is_left(); }

}  // namespace
