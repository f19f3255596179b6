// What the binding's files share. Only they know Python: they convert arguments and errors, release the GIL, add no
// behaviour.
//
// Writable from Python: the bytes of AddressRange.buffer() where something writable is mapped. Nothing else.
// Arguments are validated by the core; here only what has no C++ type yet (names of modes, lengths of bytes).
#pragma once

#include <nanobind/nanobind.h>

namespace mc2::bindings {

namespace nb = nanobind;
using namespace nb::literals;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

template <typename Class>
void add_context_manager(nb::class_<Class>& type) {
    type.def("__enter__", [](const nb::object& self) { return self; });
    type.def("__exit__", [](const nb::object& self, const nb::args&) { self.attr("close")(); });
}

void bind_memory(const nb::module_& module);
void bind_leases(const nb::module_& module);
void bind_ascend(const nb::module_& module);

}  // namespace mc2::bindings
