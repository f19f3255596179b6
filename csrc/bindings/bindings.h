// What the binding's files share. Only they know Python: they convert arguments and errors, release the GIL, add no
// behaviour.
//
// Writable from Python: the bytes of AddressRange.buffer() where something writable is mapped. Nothing else.
// Arguments are validated by the core; here only what has no C++ type yet (names of modes, lengths of bytes).
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace mc2::bindings {

namespace nb = nanobind;
using namespace nb::literals;

// Releases the GIL while it exists. Where the interpreter has begun to end meanwhile, Python before 3.14 ends a thread
// that asks for the GIL with pthread_exit, whose unwinding would reach a destructor, or a caller that swallows it, and
// abort the process. Such a thread waits here for the process to end instead, as it does in 3.14.
class GilRelease {
 public:
    GilRelease() : state_(PyEval_SaveThread()) {}
    GilRelease(const GilRelease&) = delete;
    GilRelease(GilRelease&&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;
    GilRelease& operator=(GilRelease&&) = delete;
    ~GilRelease() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) {
                ::pause();
            }
        }
    }

 private:
    PyThreadState* state_;
};

using NoGil = nb::call_guard<GilRelease>;

template <typename Class>
void add_context_manager(nb::class_<Class>& type) {
    type.def("__enter__", [](const nb::object& self) { return self; });
    type.def("__exit__", [](const nb::object& self, const nb::args&) { self.attr("close")(); });
}

void bind_memory(const nb::module_& module);
void bind_leases(const nb::module_& module);
void bind_ascend(const nb::module_& module);

}  // namespace mc2::bindings
