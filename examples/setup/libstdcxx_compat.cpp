// What the headers of a newer GCC call and the libstdc++ of a manylinux_2_28 system (GCC 8) does not have: hidden in our
// module, made of what that library has. wheels.py compiles it; a symbol that is missing here ends the build with its name.
//
// By their names in object files: declared in namespace std they would be exported, and other modules would get ours.
#include <new>

extern "C" {

// std::__throw_bad_array_new_length(), GLIBCXX_3.4.29.
[[noreturn, gnu::visibility("hidden")]] void mc2_throw_bad_array_new_length() asm(
    "_ZSt28__throw_bad_array_new_lengthv");

// std::exception_ptr's copy constructor and destructor, CXXABI_1.3.3, which newer headers have inline as the two below.
void mc2_exception_ptr_copy(void* self, void* const* other) asm(
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void mc2_exception_ptr_destroy(void** self) asm("_ZNSt15__exception_ptr13exception_ptrD1Ev");

// std::exception_ptr::_M_addref() and _M_release(), CXXABI_1.3.13.
[[gnu::visibility("hidden")]] void mc2_exception_ptr_addref(void** self) asm(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
[[gnu::visibility("hidden")]] void mc2_exception_ptr_release(void** self) asm(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void mc2_throw_bad_array_new_length() { throw std::bad_array_new_length(); }

void mc2_exception_ptr_addref(void** self) {
    void* copy = nullptr;  // never destroyed: its reference is the one that is added
    mc2_exception_ptr_copy(static_cast<void*>(&copy), self);
}

void mc2_exception_ptr_release(void** self) {
    mc2_exception_ptr_destroy(self);
    *self = nullptr;
}
}
