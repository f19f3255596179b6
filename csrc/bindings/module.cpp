// The Python module: errors, constants, and the classes of the other files.
#include <exception>
#include <system_error>

#include "bindings/bindings.h"
#include "memory/page.h"

namespace nb = nanobind;

namespace {

void translate_system_error(const std::exception_ptr& pointer, void* /*payload*/) {
    try {
        std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
        const nb::tuple arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

}  // namespace

NB_MODULE(_native, module) {  // NOLINT(performance-unnecessary-value-param): the macro says how
    nb::register_exception_translator(translate_system_error);
    // vLLM's processes end with our objects alive, by design: its tensors point into them. That is no leak to report.
    nb::set_leak_warnings(false);
    module.attr("HUGE_PAGE_BYTES") = mc2::kHugePageBytes;
    mc2::bindings::bind_memory(module);
    mc2::bindings::bind_leases(module);
    mc2::bindings::bind_ascend(module);
}
