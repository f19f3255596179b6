// A test harness in one header: no download, and it works in forked children and under every sanitizer.
//
// Inside an anonymous namespace:
//   MC2_TEST(name) { CHECK(x); CHECK_EQ(a, b); CHECK_THROWS(std::invalid_argument, f()); }
//
// A failed check prints, is counted and lets the test go on; the binary's exit status tells. check_selftest.cpp shows that
// failures are seen.
#pragma once

#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace mc2::test {

struct Test {
    std::string name;
    std::function<void()> body;
};

std::vector<Test>& tests();
void fail(const char* file, int line, const std::string& message);

struct Registration {
    Registration(const char* name, void (*body)()) {
        tests().push_back({.name = name, .body = body});
    }
};

// Runs `body` in a forked child and returns the signal that ended it, 0 when it ran through.
int signal_of_child(const std::function<void()>& body);

}  // namespace mc2::test

#define MC2_TEST(name)                                                     \
    void test_##name();                                                    \
    const mc2::test::Registration registration_##name(#name, test_##name); \
    void test_##name()

#define CHECK(condition)                                              \
    do {                                                              \
        if (!(condition)) {                                           \
            mc2::test::fail(__FILE__, __LINE__, "CHECK " #condition); \
        }                                                             \
    } while (false)

#define CHECK_EQ(left, right)                                                   \
    do {                                                                        \
        if (!((left) == (right))) {                                             \
            mc2::test::fail(__FILE__, __LINE__, "CHECK_EQ " #left ", " #right); \
        }                                                                       \
    } while (false)

#define CHECK_THROWS(type, expression)                                                   \
    do {                                                                                 \
        bool thrown = false;                                                             \
        try {                                                                            \
            (void)(expression);                                                          \
        } catch (const type&) {                                                          \
            thrown = true;                                                               \
        }                                                                                \
        if (!thrown) {                                                                   \
            mc2::test::fail(__FILE__, __LINE__, "CHECK_THROWS " #type ", " #expression); \
        }                                                                                \
    } while (false)
