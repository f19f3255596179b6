// Owner of one mmap-ed region. Move-only; unmaps on destruction. Not thread-safe.
#pragma once

#include <cstddef>
#include <utility>

namespace mc2 {

enum class Access { kReadOnly, kReadWrite };

class Mapping {
 public:
    Mapping() = default;
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        if (this != &other) {
            reset();
            data_ = std::exchange(other.data_, nullptr);
            size_ = std::exchange(other.size_, 0);
        }
        return *this;
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { reset(); }

    // Inaccessible address space aligned to 2 MiB, so that 2 MiB pages fit wherever offsets are aligned too.
    static Mapping reserve(std::size_t num_bytes);
    // The first `num_bytes` of a file, shared.
    static Mapping of_file(int fd, std::size_t num_bytes, Access access);

    // Maps the file over the start of a reservation.
    void replace_with_file(int fd, Access access);

    void reset() noexcept;
    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::size_t size() const { return size_; }

 private:
    Mapping(std::byte* data, std::size_t size) : data_(data), size_(size) {}

    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace mc2
