// Device memory of Ascend NPUs, as Python sees it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ascend/acl_library.h"
#include "ascend/address_probe.h"
#include "ascend/device_copy.h"
#include "ascend/device_export.h"
#include "ascend/device_import.h"
#include "ascend/segment.h"
#include "bindings/bindings.h"

namespace mc2::bindings {
namespace {

using ascend::Acl;
using ascend::AclPointer;
using ascend::AddressProbe;
using ascend::DeviceCopier;
using ascend::DeviceExport;
using ascend::DeviceImport;
using ascend::Segment;

// (kind, address in the exporter, bytes, handle)
using SegmentTuple = std::tuple<std::string, std::uintptr_t, std::size_t, nb::bytes>;

std::vector<Segment> segments_of(const std::vector<SegmentTuple>& tuples) {
    std::vector<Segment> segments;
    segments.reserve(tuples.size());
    for (const auto& [kind, base, num_bytes, handle] : tuples) {
        segments.push_back({.kind = ascend::segment_kind_of(kind),
                            .base = base,
                            .num_bytes = num_bytes,
                            .handle = std::string(handle.c_str(), handle.size())});
    }
    return segments;
}

nb::tuple tuple_of(const Segment& segment) {
    return nb::make_tuple(ascend::name_of(segment.kind), segment.base, segment.num_bytes,
                          nb::bytes(segment.handle.data(), segment.handle.size()));
}

struct ErrorTypes {
    nb::object acl_error;
    nb::object not_supported;
};

// The driver's text is in no known encoding.
nb::object text_of(const std::string& text) {
    return nb::steal(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

// NOLINTNEXTLINE(misc-const-correctness): nanobind says what the parameters are
void translate_acl_error(const std::exception_ptr& pointer, void* payload) {
    const auto& types = *static_cast<const ErrorTypes*>(payload);
    try {
        std::rethrow_exception(pointer);
    } catch (const ascend::AclError& error) {
        const nb::object& type = error.is_not_supported() ? types.not_supported : types.acl_error;
        const nb::object instance = type(text_of(error.what()));
        instance.attr("call") = error.call();
        instance.attr("code") = error.code();
        PyErr_SetObject(type.ptr(), instance.ptr());
    }
}

nb::object new_error(const nb::module_& module, const char* name, const nb::handle& base) {
    const std::string qualified = std::string("vllm_mc2._native.") + name;
    nb::object type = nb::steal(PyErr_NewException(qualified.c_str(), base.ptr(), nullptr));
    if (!type.is_valid()) {
        throw nb::python_error();
    }
    module.attr(name) = type;
    return type;
}

void bind_errors(const nb::module_& module) {
    // For as long as the process, as the module itself. NOLINTNEXTLINE(cppcoreguidelines-owning-memory)
    auto* types = new ErrorTypes;
    types->acl_error = new_error(module, "AclError", PyExc_RuntimeError);
    types->not_supported = new_error(module, "AclNotSupportedError", types->acl_error);
    nb::register_exception_translator(translate_acl_error, types);
}

// Copies share one table.
struct SharedAcl {
    AclPointer acl;
};

void bind_acl(const nb::module_& module) {
    nb::class_<SharedAcl>(module, "Acl")
        .def(
            "__init__",
            [](SharedAcl* self, const std::string& path) {
                const GilRelease no_gil;
                new (self) SharedAcl{std::make_shared<const Acl>(path)};
            },
            "path"_a = "libascendcl.so")
        .def(
            "has",
            [](const SharedAcl& self, const std::string& name) { return self.acl->has(name); },
            "name"_a)
        .def(
            "initialize", [](const SharedAcl& self) { self.acl->initialize(); }, NoGil())
        .def(
            "num_devices", [](const SharedAcl& self) { return self.acl->num_devices(); }, NoGil())
        .def(
            "set_device",
            [](const SharedAcl& self, std::int32_t device) { self.acl->set_device(device); },
            NoGil(), "device"_a)
        .def(
            "bare_tgid", [](const SharedAcl& self) { return self.acl->bare_tgid(); }, NoGil())
        .def(
            "device_info",
            [](const SharedAcl& self, std::uint32_t device, std::uint32_t attribute) {
                return self.acl->device_info(device, attribute);
            },
            NoGil(), "device"_a, "attribute"_a)
        .def(
            "topology",
            [](const SharedAcl& self, std::uint32_t device, std::uint32_t other) {
                return self.acl->topology(device, other);
            },
            NoGil(), "device"_a, "other"_a)
        .def(
            "physical_device",
            [](const SharedAcl& self, std::int32_t device) {
                return self.acl->physical_device(device);
            },
            NoGil(), "device"_a)
        .def(
            "can_access_peer",
            [](const SharedAcl& self, std::int32_t device, std::int32_t other) {
                return self.acl->can_access_peer(device, other);
            },
            NoGil(), "device"_a, "other"_a)
        .def("soc_name", [](const SharedAcl& self) { return self.acl->soc_name(); })
        .def(
            "version",
            [](const SharedAcl& self, const std::string& package) {
                return self.acl->version(package);
            },
            NoGil(), "package"_a);
}

void bind_export(const nb::module_& module) {
    nb::class_<DeviceExport> type(module, "DeviceExport");
    type.def(
            "__init__",
            [](DeviceExport* self, const SharedAcl& acl, std::int32_t device) {
                const GilRelease no_gil;
                new (self) DeviceExport(acl.acl, device);
            },
            "acl"_a, "device"_a)
        .def(
            "add_allocation",
            [](DeviceExport& self, std::uintptr_t address, std::size_t num_bytes, bool fabric) {
                std::vector<Segment> segments;
                {
                    const GilRelease no_gil;
                    segments = self.add_allocation(address, num_bytes, fabric);
                }
                nb::list rows;
                for (const Segment& segment : segments) {
                    rows.append(tuple_of(segment));
                }
                return rows;
            },
            "address"_a, "num_bytes"_a, nb::kw_only(), "fabric"_a = false)
        .def(
            "add_key",
            [](DeviceExport& self, std::uintptr_t address, std::size_t num_bytes) {
                const Segment segment = [&] {
                    const GilRelease no_gil;
                    return self.add_key(address, num_bytes);
                }();
                return tuple_of(segment);
            },
            "address"_a, "num_bytes"_a)
        .def("admit", &DeviceExport::admit, NoGil(), "pid"_a)
        .def_prop_ro("num_segments", &DeviceExport::num_segments, NoGil())
        .def_prop_ro("num_bytes", &DeviceExport::num_bytes, NoGil())
        .def("close", &DeviceExport::close, NoGil());
    add_context_manager(type);
}

void bind_import(const nb::module_& module) {
    nb::class_<DeviceImport> type(module, "DeviceImport");
    type.def(
            "__init__",
            [](DeviceImport* self, const SharedAcl& acl, std::int32_t device,
               const std::vector<SegmentTuple>& tuples) {
                std::vector<Segment> segments = segments_of(tuples);
                const GilRelease no_gil;
                new (self) DeviceImport(acl.acl, device, std::move(segments));
            },
            "acl"_a, "device"_a, "segments"_a)
        .def("translate", &DeviceImport::translate, NoGil(), "address"_a, "num_bytes"_a)
        .def_prop_ro("num_bytes", &DeviceImport::num_bytes, NoGil())
        .def_prop_ro("num_mappings", &DeviceImport::num_mappings, NoGil())
        .def("close", &DeviceImport::close, NoGil());
    add_context_manager(type);
}

void bind_copier(const nb::module_& module) {
    using Ids = std::vector<std::int64_t>;
    using StripTuple =
        std::tuple<std::uintptr_t, std::size_t, std::uintptr_t, std::size_t, std::size_t>;
    nb::class_<DeviceCopier> type(module, "DeviceCopier");
    type.def(
            "__init__",
            [](DeviceCopier* self, const SharedAcl& acl, std::int32_t device,
               const DeviceImport& source, const std::vector<StripTuple>& tuples,
               std::size_t num_dst_blocks, std::size_t num_src_blocks, std::size_t num_streams) {
                std::vector<ascend::DeviceStrip> strips;
                strips.reserve(tuples.size());
                for (const auto& [own, own_stride, peer, peer_stride, num_bytes] : tuples) {
                    strips.push_back({.own_address = own,
                                      .own_stride = own_stride,
                                      .peer_address = peer,
                                      .peer_stride = peer_stride,
                                      .num_bytes = num_bytes});
                }
                const GilRelease no_gil;
                new (self) DeviceCopier(acl.acl, device, source.share(), std::move(strips),
                                        num_dst_blocks, num_src_blocks, num_streams);
            },
            "acl"_a, "device"_a, "source"_a, "strips"_a, "num_dst_blocks"_a, "num_src_blocks"_a,
            "num_streams"_a = 4)
        .def_prop_ro("bytes_per_block", &DeviceCopier::bytes_per_block)
        .def(
            "copy",
            [](DeviceCopier& self, const Ids& dst_ids, const Ids& src_ids, std::size_t num_threads,
               double timeout_seconds) {
                return self.copy(dst_ids, src_ids, num_threads,
                                 std::chrono::duration<double>(timeout_seconds));
            },
            NoGil(), "dst_ids"_a, "src_ids"_a, "num_threads"_a = 1, nb::kw_only(),
            "timeout_seconds"_a = 30.0)
        .def("close", &DeviceCopier::close, NoGil());
    add_context_manager(type);
}

void bind_probe(const nb::module_& module) {
    nb::class_<AddressProbe> type(module, "AddressProbe");
    type.def(
            "__init__",
            [](AddressProbe* self, const SharedAcl& acl, std::int32_t device, std::size_t own_bytes,
               const std::vector<SegmentTuple>& peer) {
                std::vector<Segment> segments = segments_of(peer);
                const GilRelease no_gil;
                new (self) AddressProbe(acl.acl, device, own_bytes, std::move(segments));
            },
            "acl"_a, "device"_a, "own_bytes"_a, "peer"_a)
        .def_prop_ro("address", &AddressProbe::address)
        .def_prop_ro("own_bytes", &AddressProbe::own_bytes)
        .def_prop_ro("peer_bytes", &AddressProbe::peer_bytes)
        .def("close", &AddressProbe::close, NoGil());
    add_context_manager(type);
}

}  // namespace

void bind_ascend(const nb::module_& module) {
    bind_errors(module);
    bind_acl(module);
    bind_export(module);
    bind_import(module);
    bind_copier(module);
    bind_probe(module);
}

}  // namespace mc2::bindings
