// A loop over several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace mc2 {

// Calls visit(i) for i below count from up to num_threads threads, this one included, and waits for all. The first
// exception stops the others and is rethrown.
void parallel_for(std::size_t count, std::size_t num_threads,
                  const std::function<void(std::size_t)>& visit);

}  // namespace mc2
