// Owner of one file descriptor. Move-only; closes on destruction. Not thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace mc2 {

class FileDescriptor {
 public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor() { reset(); }

    void reset() noexcept;
    [[nodiscard]] int get() const { return fd_; }
    [[nodiscard]] bool valid() const { return fd_ >= 0; }

 private:
    int fd_ = -1;
};

// A sealable, close-on-exec memfd of `num_bytes`, nothing committed yet.
FileDescriptor make_memfd(const std::string& name, std::size_t num_bytes, bool hugetlb);

// Commits [0, num_bytes), so that touching it cannot fail later. Throws ENOSPC or ENOMEM with the size.
void commit(int fd, std::size_t num_bytes);

void add_seals(int fd, int seals);

// What a foreign descriptor is good for. Throws std::invalid_argument unless it is a memfd sealed against shrinking:
// its owner could otherwise truncate it, and our next read of the mapping would be SIGBUS.
struct SealedFile {
    std::size_t num_bytes;
    bool hugetlb;
    int seals;
};
SealedFile inspect_sealed(int fd);

}  // namespace mc2
