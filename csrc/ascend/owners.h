// Owners of what ACL gives. Move-only, not thread-safe; the device must be set in the thread that makes or ends one.
//
// reset() gives back and is true when nothing is owned any more. When ACL refuses, the owner keeps what it has, so that the
// caller can report the failure and try again; a destructor tries once more and can do nothing about a refusal.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "ascend/acl_library.h"

namespace mc2::ascend {

template <typename Traits>
class Owner {
 public:
    using Value = void*;

    Owner() = default;
    Owner(AclPointer acl, Value value) : acl_(std::move(acl)), value_(value) {}
    Owner(Owner&& other) noexcept
        : acl_(std::move(other.acl_)), value_(std::exchange(other.value_, nullptr)) {}
    Owner& operator=(Owner&& other) noexcept {
        if (this != &other) {
            (void)reset(nullptr);  // see above
            acl_ = std::move(other.acl_);
            value_ = std::exchange(other.value_, nullptr);
        }
        return *this;
    }
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    ~Owner() { (void)reset(nullptr); }

    [[nodiscard]] bool reset(FirstError* first) {
        if (value_ != nullptr && Traits::give_back(*acl_, value_, first)) {
            value_ = nullptr;
        }
        return value_ == nullptr;
    }

    // Lets it be, for good.
    void abandon() noexcept { value_ = nullptr; }

    [[nodiscard]] Value get() const { return value_; }
    explicit operator bool() const { return value_ != nullptr; }

 private:
    AclPointer acl_;
    Value value_ = nullptr;
};

struct ReservationTraits {
    static bool give_back(const Acl& acl, void* address, FirstError* first) {
        return acl.aclrtReleaseMemAddress.attempt(first, address);
    }
};
struct PhysicalTraits {
    static bool give_back(const Acl& acl, void* handle, FirstError* first) {
        return acl.aclrtFreePhysical.attempt(first, handle);
    }
};
struct MappingTraits {
    static bool give_back(const Acl& acl, void* address, FirstError* first) {
        return acl.aclrtUnmapMem.attempt(first, address);
    }
};
struct StreamTraits {
    static bool give_back(const Acl& acl, void* stream, FirstError* first) {
        return acl.aclrtDestroyStream.attempt(first, stream);
    }
};

using Reservation = Owner<ReservationTraits>;  // of addresses
using PhysicalHandle = Owner<PhysicalTraits>;  // of memory: allocated, retained or imported
using DeviceMapping = Owner<MappingTraits>;    // of memory at addresses
using Stream = Owner<StreamTraits>;

// Takes out what `reset` says is done with; true when nothing is left.
template <typename Item, typename Reset>
bool reset_all(std::vector<Item>& items, const Reset& reset) {
    std::size_t num_kept = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
        if (!reset(items[i])) {
            if (num_kept != i) {
                items[num_kept] = std::move(items[i]);
            }
            ++num_kept;
        }
    }
    items.erase(items.begin() + static_cast<std::ptrdiff_t>(num_kept), items.end());
    return items.empty();
}

// Aligned and made for huge pages.
Reservation reserve(const AclPointer& acl, std::size_t num_bytes);
// Own memory of the current device.
PhysicalHandle allocate(const AclPointer& acl, std::int32_t device, std::size_t num_bytes);
// All of the memory behind `handle`, which must be of exactly that size.
DeviceMapping map(const AclPointer& acl, void* address, std::size_t num_bytes,
                  const PhysicalHandle& handle);
Stream make_stream(const AclPointer& acl);

}  // namespace mc2::ascend
