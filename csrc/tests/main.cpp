#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <exception>

#include "check.h"

namespace mc2::test {
namespace {

std::atomic<int> num_failed{0};

}  // namespace

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

void fail(const char* file, int line, const std::string& message) {
    ++num_failed;
    std::cerr << file << ":" << line << ": " << message << '\n';
}

int signal_of_child(const std::function<void()>& body) {
    const pid_t child = ::fork();
    if (child == 0) {
        // Sanitizers turn the signal into a report and an exit status; here the signal is the answer.
        (void)std::signal(SIGSEGV, SIG_DFL);
        (void)std::signal(SIGBUS, SIG_DFL);
        body();
        ::_exit(0);
    }
    int status = 0;
    if (child < 0 || ::waitpid(child, &status, 0) != child) {
        fail(__FILE__, __LINE__, "fork or waitpid");
        return -1;
    }
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace mc2::test

int main() {
    for (const auto& test : mc2::test::tests()) {
        try {
            test.body();
        } catch (const std::exception& error) {
            mc2::test::fail(test.name.c_str(), 0, std::string("uncaught: ") + error.what());
        }
    }
    std::cout << mc2::test::tests().size() << " tests, " << mc2::test::num_failed
              << " failed checks\n";
    return mc2::test::num_failed == 0 && !mc2::test::tests().empty() ? 0 : 1;
}
