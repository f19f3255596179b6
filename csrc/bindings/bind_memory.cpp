// Pools, address ranges and the copy between blocks, as Python sees them.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "memory/address_range.h"
#include "memory/block_copy.h"
#include "memory/errors.h"
#include "memory/page.h"
#include "memory/pool.h"

namespace mc2::bindings {
namespace {

HugePages huge_pages_of(const std::string& name) {
    if (name == "auto") {
        return HugePages::kAuto;
    }
    if (name == "off") {
        return HugePages::kOff;
    }
    if (name == "require") {
        return HugePages::kRequire;
    }
    throw_invalid("huge_pages is \"" + name + "\", must be auto, off or require");
}

const char* name_of(HugePageMethod method) {
    switch (method) {
        case HugePageMethod::kHugetlb:
            return "hugetlb";
        case HugePageMethod::kThp:
            return "thp";
        case HugePageMethod::kCollapse:
            return "collapse";
        case HugePageMethod::kNone:
            break;
    }
    return "none";
}

const char* name_of(PartKind kind) {
    switch (kind) {
        case PartKind::kPool:
            return "pool";
        case PartKind::kPeer:
            return "peer";
        case PartKind::kAnonymous:
            break;
    }
    return "anonymous";
}

void bind_pool(const nb::module_& module) {
    nb::class_<Pool> type(module, "Pool");
    type.def(
            "__init__",
            [](Pool* self, std::size_t num_bytes, const std::string& huge_pages,
               const std::string& name) {
                const HugePages mode = huge_pages_of(huge_pages);
                const GilRelease no_gil;
                new (self) Pool(num_bytes, mode, name);
            },
            "num_bytes"_a, nb::kw_only(), "huge_pages"_a = "auto", "name"_a = "mc2-pool")
        .def_prop_ro("num_bytes", &Pool::num_bytes)
        .def_prop_ro("fd", &Pool::exported_fd)
        .def_prop_ro("page_bytes", &Pool::page_bytes)
        .def_prop_ro("huge_bytes", &Pool::huge_bytes)
        .def_prop_ro("method", [](const Pool& self) { return name_of(self.method()); })
        .def_prop_ro("sealed", &Pool::sealed)
        .def("seal", &Pool::seal)
        .def("close", &Pool::close, NoGil());
    add_context_manager(type);
}

// Shares the range with the buffers made from it, so that a tensor keeps its memory whatever happens to the owner.
class SharedRange {
 public:
    explicit SharedRange(std::size_t num_bytes)
        : range_(std::make_shared<AddressRange>(num_bytes)) {}

    AddressRange& operator*() const { return *range_; }
    AddressRange* operator->() const { return range_.get(); }

    [[nodiscard]] nb::object buffer() const {
        if (range_->address() == nullptr) {
            throw_invalid("address range is closed");
        }
        auto keep_alive = std::make_unique<std::shared_ptr<AddressRange>>(range_);
        const nb::capsule owner(keep_alive.get(), [](void* pointer) noexcept {
            const std::unique_ptr<std::shared_ptr<AddressRange>> last(
                static_cast<std::shared_ptr<AddressRange>*>(pointer));
        });
        (void)keep_alive.release();
        using Bytes = nb::ndarray<nb::memview, std::int8_t, nb::ndim<1>, nb::c_contig>;
        return nb::cast(Bytes(range_->address(), {range_->num_bytes()}, owner));
    }

    // Views are made and dropped with the GIL held, as this runs, so the count is exact.
    void close() const {
        if (range_.use_count() > 1) {
            throw_invalid("address range cannot be closed: " +
                          std::to_string(range_.use_count() - 1) + " views are alive");
        }
        range_->close();
    }

    // For others that keep the range.
    [[nodiscard]] std::shared_ptr<AddressRange> share() const { return range_; }

 private:
    std::shared_ptr<AddressRange> range_;
};

void bind_address_range(const nb::module_& module) {
    using CopyTuple = std::tuple<std::size_t, std::size_t, std::size_t>;
    nb::class_<SharedRange> type(module, "AddressRange");
    type.def(nb::init<std::size_t>(), "num_bytes"_a)
        .def_prop_ro("address",
                     [](const SharedRange& self) {
                         return reinterpret_cast<std::uintptr_t>(self->address());
                     })
        .def_prop_ro("num_bytes", [](const SharedRange& self) { return self->num_bytes(); })
        .def(
            "map_pool",
            [](const SharedRange& self, std::size_t offset, const Pool& pool,
               std::size_t pool_offset,
               std::size_t num_bytes) { self->map_pool(offset, pool, pool_offset, num_bytes); },
            NoGil(), "offset"_a, "pool"_a, "pool_offset"_a, "num_bytes"_a)
        .def(
            "map_anonymous",
            [](const SharedRange& self, std::size_t offset, std::size_t num_bytes) {
                self->map_anonymous(offset, num_bytes);
            },
            NoGil(), "offset"_a, "num_bytes"_a)
        .def(
            "map_peer",
            [](const SharedRange& self, std::size_t offset, int fd, std::size_t fd_offset,
               std::size_t num_bytes) { self->map_peer(offset, fd, fd_offset, num_bytes); },
            NoGil(), "offset"_a, "fd"_a, "fd_offset"_a, "num_bytes"_a)
        .def(
            "unmap",
            [](const SharedRange& self, std::size_t offset, std::size_t num_bytes) {
                self->unmap(offset, num_bytes);
            },
            NoGil(), "offset"_a, "num_bytes"_a)
        .def(
            "prefault",
            [](const SharedRange& self, std::size_t offset, std::size_t num_bytes) {
                self->prefault(offset, num_bytes);
            },
            NoGil(), "offset"_a, "num_bytes"_a)
        .def(
            "copy",
            [](const SharedRange& self, const std::vector<CopyTuple>& tuples) {
                std::vector<Copy> copies;
                copies.reserve(tuples.size());
                for (const auto& [dst_offset, src_offset, num_bytes] : tuples) {
                    copies.push_back({.dst_offset = dst_offset,
                                      .src_offset = src_offset,
                                      .num_bytes = num_bytes});
                }
                self->copy(copies);
            },
            NoGil(), "copies"_a)
        .def("buffer", &SharedRange::buffer)
        .def("mappings",
             [](const SharedRange& self) {
                 nb::list rows;
                 for (const Part& part : self->mappings()) {
                     rows.append(nb::make_tuple(part.offset, part.num_bytes, name_of(part.kind)));
                 }
                 return rows;
             })
        .def("close", &SharedRange::close);
    add_context_manager(type);
}

// With its source and its destinations, which Python owns.
class SharedCopier {
 public:
    using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Size = std::size_t;
    // Destination, offset of its block 0 and stride there; offset and stride in the source; bytes of each block.
    using StripTuple = std::tuple<Bytes, Size, Size, Size, Size, Size>;

    SharedCopier(const SharedRange& source, const std::vector<StripTuple>& strips,
                 Size num_dst_blocks, Size num_src_blocks)
        : source_(source.share()),
          copier_(*source_, keep(strips, num_dst_blocks), num_dst_blocks, num_src_blocks) {}

    [[nodiscard]] const BlockCopier& copier() const { return copier_; }

 private:
    std::vector<Strip> keep(const std::vector<StripTuple>& strips, Size num_dst_blocks) {
        std::vector<Strip> kept;
        kept.reserve(strips.size());
        for (const auto& [bytes, dst_offset, dst_stride, src_offset, src_stride, num_bytes] :
             strips) {
            const Size size = bytes.size();
            const bool is_inside =
                num_dst_blocks > 0 && dst_stride <= size && num_bytes <= size &&
                num_dst_blocks - 1 <= size / std::max<Size>(1, dst_stride) &&
                fits(dst_offset, (num_dst_blocks - 1) * dst_stride + num_bytes, size);
            if (!is_inside) {
                throw_invalid(std::to_string(num_dst_blocks) + " blocks at offset " +
                              std::to_string(dst_offset) + " are outside a destination of " +
                              std::to_string(size) + " bytes");
            }
            kept.push_back({.dst = reinterpret_cast<std::byte*>(bytes.data()) + dst_offset,
                            .dst_stride = dst_stride,
                            .src_offset = src_offset,
                            .src_stride = src_stride,
                            .num_bytes = num_bytes});
            destinations_.push_back(bytes);
        }
        return kept;
    }

    std::shared_ptr<AddressRange> source_;
    std::vector<Bytes> destinations_;
    BlockCopier copier_;
};

void bind_block_copier(const nb::module_& module) {
    using Ids = std::vector<std::int32_t>;
    nb::class_<SharedCopier>(module, "BlockCopier")
        .def(nb::init<const SharedRange&, const std::vector<SharedCopier::StripTuple>&, std::size_t,
                      std::size_t>(),
             "source"_a, "strips"_a, "num_dst_blocks"_a, "num_src_blocks"_a)
        .def_prop_ro("bytes_per_block",
                     [](const SharedCopier& self) { return self.copier().bytes_per_block(); })
        .def(
            "copy",
            [](const SharedCopier& self, const Ids& dst_ids, const Ids& src_ids,
               std::size_t num_threads) {
                return self.copier().copy(dst_ids, src_ids, num_threads);
            },
            NoGil(), "dst_ids"_a, "src_ids"_a, "num_threads"_a);
}

}  // namespace

void bind_memory(const nb::module_& module) {
    bind_pool(module);
    bind_address_range(module);
    bind_block_copier(module);
}

}  // namespace mc2::bindings
