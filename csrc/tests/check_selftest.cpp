// Every kind of check must be able to fail: ctest expects this binary to exit with the number of failures it announces.
#include <stdexcept>

#include "check.h"

namespace {

MC2_TEST(failed_condition) { CHECK(1 + 1 == 3); }
MC2_TEST(failed_equality) { CHECK_EQ(1, 2); }
MC2_TEST(missing_throw) { CHECK_THROWS(std::invalid_argument, 1); }
MC2_TEST(uncaught_exception) { throw std::runtime_error("on purpose"); }

}  // namespace
