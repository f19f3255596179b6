// libopapi.so: the few operators that tests need, with real results. All others are missing, so that whoever needs one
// is told instead of getting memory that nobody wrote.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "abi.h"
#include "operator_hook.h"
#include "tensors.h"

namespace {

constexpr aclError kUnknownType = 161002;  // aclnn's code for a parameter that it does not take

struct Executor {
    std::vector<mc2_sim_extent> extents;
    std::function<void(std::byte* const* views)> work;
};

mc2_sim_extent extent(const Tensor& tensor, bool is_written) {
    const ops::Extent found = ops::extent_of(tensor);
    return {
        .pointer = found.start, .size_bytes = found.size_bytes, .is_written = is_written ? 1 : 0};
}

aclError prepare(uint64_t* workspace_bytes, Executor** executor,
                 std::vector<mc2_sim_extent> extents,
                 std::function<void(std::byte* const* views)> work) {
    *workspace_bytes = 0;
    *executor = new Executor{.extents = std::move(extents), .work = std::move(work)};
    return acl::kSuccess;
}

// An operator on nothing has nothing to do.
aclError run(Executor* executor, aclrtStream stream) {
    for (const mc2_sim_extent& wanted : executor->extents) {
        if (wanted.size_bytes == 0) {
            delete executor;
            return acl::kSuccess;
        }
    }
    return mc2_sim_submit_operator(
        stream, executor->extents.data(), executor->extents.size(),
        [](void* own, std::byte* const* views) { static_cast<Executor*>(own)->work(views); },
        [](void* own) { delete static_cast<Executor*>(own); }, executor);
}

bool is_known(const Tensor* tensor) {
    return tensor != nullptr && ops::item_bytes(tensor->type) != 0;
}

// The source, seen with the destination's sizes: missing and single sizes are repeated.
bool broadcast(const Tensor& source, const std::vector<int64_t>& sizes, Tensor* seen) {
    if (source.sizes.size() > sizes.size()) {
        return false;
    }
    *seen = source;
    const size_t missing = sizes.size() - source.sizes.size();
    seen->sizes = sizes;
    seen->strides.assign(sizes.size(), 0);
    for (size_t i = 0; i < source.sizes.size(); ++i) {
        if (source.sizes[i] == sizes[missing + i]) {
            seen->strides[missing + i] = source.strides[i];
        } else if (source.sizes[i] != 1) {
            return false;
        }
    }
    return true;
}

void copy_items(std::byte* into, const Tensor& destination, const std::byte* from,
                const Tensor& source) {
    const bool is_same = destination.type == source.type;
    const size_t num_dims =
        is_same ? std::min(ops::num_dense_dims(destination), ops::num_dense_dims(source)) : 0;
    const Tensor outer = ops::without_last(destination, num_dims);
    const int64_t num_runs = ops::num_items(outer);
    if (num_runs == 0) {
        return;
    }
    const auto run_items = static_cast<size_t>(ops::num_items(destination) / num_runs);
    std::vector<size_t> places;
    places.reserve(static_cast<size_t>(num_runs));
    ops::for_each(outer, [&](size_t offset) { places.push_back(offset); });
    size_t i = 0;
    ops::for_each(ops::without_last(source, num_dims), [&](size_t offset) {
        std::byte* at = into + places[i++];
        if (is_same) {
            std::memmove(at, from + offset, run_items * ops::item_bytes(destination.type));
        } else {
            ops::store(at, destination.type, ops::load(from + offset, source.type));
        }
    });
}

// Every item gets these bytes.
void fill_items(std::byte* into, const Tensor& tensor, long double value) {
    const size_t item = ops::item_bytes(tensor.type);
    const Tensor outer = ops::without_last(tensor, ops::num_dense_dims(tensor));
    const int64_t num_runs = ops::num_items(outer);
    if (num_runs == 0) {
        return;
    }
    const auto run_items = static_cast<size_t>(ops::num_items(tensor) / num_runs);
    ops::for_each(outer, [&](size_t offset) {
        std::byte* start = into + offset;
        if (value == 0) {
            std::memset(start, 0, run_items * item);
            return;
        }
        for (size_t i = 0; i < run_items; ++i) {
            ops::store(start + i * item, tensor.type, value);
        }
    });
}

// One row of dimension `dim`.
Tensor row_of(const Tensor& tensor, size_t dim, int64_t index) {
    Tensor row = tensor;
    row.offset += index * tensor.strides[dim];
    row.sizes[dim] = 1;
    return row;
}

struct Rows {
    Tensor self;
    Tensor index;
    Tensor other;
    size_t dim = 0;
};

// Between the rows of `self` that the index names and the rows of `other` in turn.
void copy_rows(const Rows& rows, std::byte* self, const std::byte* index, std::byte* other,
               bool into_self) {
    int64_t at = 0;
    const auto start = static_cast<size_t>(rows.self.offset) * ops::item_bytes(rows.self.type);
    const auto other_start =
        static_cast<size_t>(rows.other.offset) * ops::item_bytes(rows.other.type);
    ops::for_each(rows.index, [&](size_t offset) {
        const auto row = static_cast<int64_t>(ops::load(index + offset, rows.index.type));
        const int64_t size = rows.self.sizes[rows.dim];
        const int64_t wanted = row < 0 ? row + size : row;
        const int64_t own = at++;
        if (wanted < 0 || wanted >= size) {
            return;  // a device reads or writes anything there
        }
        const Tensor a = row_of(rows.self, rows.dim, wanted);
        const Tensor b = row_of(rows.other, rows.dim, own);
        std::byte* a_at = self + static_cast<size_t>(a.offset) * ops::item_bytes(a.type) - start;
        std::byte* b_at =
            other + static_cast<size_t>(b.offset) * ops::item_bytes(b.type) - other_start;
        into_self ? copy_items(a_at, a, b_at, b) : copy_items(b_at, b, a_at, a);
    });
}

bool are_rows(const Tensor* self, int64_t dim, const Tensor* index, const Tensor* other,
              Rows* rows) {
    if (!is_known(self) || !is_known(index) || !is_known(other) || self->sizes.empty()) {
        return false;
    }
    const auto num_dims = static_cast<int64_t>(self->sizes.size());
    *rows = {.self = *self,
             .index = *index,
             .other = *other,
             .dim = static_cast<size_t>(dim < 0 ? dim + num_dims : dim)};
    return rows->dim < self->sizes.size() && other->sizes.size() == self->sizes.size() &&
           other->sizes[rows->dim] == ops::num_items(*index);
}

}  // namespace

#define SIM_OPERATOR(name)                                                             \
    SIM_API aclError name(void* /*workspace*/, uint64_t /*bytes*/, Executor* executor, \
                          aclrtStream stream) {                                        \
        return run(executor, stream);                                                  \
    }

SIM_OPERATOR(aclnnInplaceZero)
SIM_OPERATOR(aclnnInplaceOne)
SIM_OPERATOR(aclnnInplaceFillScalar)
SIM_OPERATOR(aclnnInplaceCopy)
SIM_OPERATOR(aclnnCast)
SIM_OPERATOR(aclnnIndex)
SIM_OPERATOR(aclnnIndexSelect)
SIM_OPERATOR(aclnnInplaceIndexCopy)

namespace {

aclError prepare_fill(const Tensor* self, long double value, uint64_t* workspace_bytes,
                      Executor** executor) {
    if (!is_known(self)) {
        return kUnknownType;
    }
    return prepare(
        workspace_bytes, executor, {extent(*self, true)},
        [self = *self, value](std::byte* const* views) { fill_items(views[0], self, value); });
}

}  // namespace

SIM_API aclError aclnnInplaceZeroGetWorkspaceSize(Tensor* self, uint64_t* workspace_bytes,
                                                  Executor** executor) {
    return prepare_fill(self, 0, workspace_bytes, executor);
}

SIM_API aclError aclnnInplaceOneGetWorkspaceSize(Tensor* self, uint64_t* workspace_bytes,
                                                 Executor** executor) {
    return prepare_fill(self, 1, workspace_bytes, executor);
}

SIM_API aclError aclnnInplaceFillScalarGetWorkspaceSize(Tensor* self, const Scalar* value,
                                                        uint64_t* workspace_bytes,
                                                        Executor** executor) {
    return prepare_fill(self, value->value, workspace_bytes, executor);
}

SIM_API aclError aclnnInplaceCopyGetWorkspaceSize(Tensor* self, const Tensor* source,
                                                  uint64_t* workspace_bytes, Executor** executor) {
    Tensor seen;
    if (!is_known(self) || !is_known(source) || !broadcast(*source, self->sizes, &seen)) {
        return kUnknownType;
    }
    return prepare(workspace_bytes, executor, {extent(*self, true), extent(seen, false)},
                   [self = *self, seen](std::byte* const* views) {
                       copy_items(views[0], self, views[1], seen);
                   });
}

SIM_API aclError aclnnCastGetWorkspaceSize(const Tensor* source, int /*type*/, Tensor* out,
                                           uint64_t* workspace_bytes, Executor** executor) {
    return aclnnInplaceCopyGetWorkspaceSize(out, source, workspace_bytes, executor);
}

SIM_API aclError aclnnIndexSelectGetWorkspaceSize(const Tensor* self, int64_t dim,
                                                  const Tensor* index, Tensor* out,
                                                  uint64_t* workspace_bytes, Executor** executor) {
    Rows rows;
    if (!are_rows(self, dim, index, out, &rows)) {
        return kUnknownType;
    }
    return prepare(
        workspace_bytes, executor,
        {extent(*self, false), extent(*index, false), extent(*out, true)},
        [rows](std::byte* const* views) { copy_rows(rows, views[0], views[1], views[2], false); });
}

SIM_API aclError aclnnInplaceIndexCopyGetWorkspaceSize(Tensor* self, int64_t dim,
                                                       const Tensor* index, const Tensor* source,
                                                       uint64_t* workspace_bytes,
                                                       Executor** executor) {
    Rows rows;
    if (!are_rows(self, dim, index, source, &rows)) {
        return kUnknownType;
    }
    return prepare(
        workspace_bytes, executor,
        {extent(*self, true), extent(*index, false), extent(*source, false)},
        [rows](std::byte* const* views) { copy_rows(rows, views[0], views[1], views[2], true); });
}

// With one index of one dimension; the dimensions before it are taken whole.
SIM_API aclError aclnnIndexGetWorkspaceSize(const Tensor* self, const TensorList* indices,
                                            Tensor* out, uint64_t* workspace_bytes,
                                            Executor** executor) {
    const Tensor* index = nullptr;
    int64_t dim = 0;
    for (size_t i = 0; i < indices->tensors.size(); ++i) {
        const Tensor* one = indices->tensors[i];
        if (one == nullptr || ops::num_items(*one) == 0) {
            continue;
        }
        if (index != nullptr || one->sizes.size() != 1) {
            return kUnknownType;
        }
        index = one;
        dim = static_cast<int64_t>(i);
    }
    return aclnnIndexSelectGetWorkspaceSize(self, dim, index, out, workspace_bytes, executor);
}

SIM_API TensorList* aclCreateTensorList(Tensor* const* tensors, uint64_t num) {
    return new TensorList{.tensors = {tensors, tensors + num}};
}

// The list owns its tensors.
SIM_API int aclDestroyTensorList(const TensorList* list) {
    for (const Tensor* tensor : list->tensors) {
        delete tensor;
    }
    delete list;
    return 0;
}

SIM_API Tensor* aclCreateTensor(const int64_t* sizes, uint64_t num_sizes, int type,
                                const int64_t* strides, int64_t offset, int /*format*/,
                                const int64_t* /*storage_sizes*/, uint64_t /*num_storage_sizes*/,
                                void* data) {
    return new Tensor{.sizes = {sizes, sizes + num_sizes},
                      .strides = {strides, strides + num_sizes},
                      .type = type,
                      .offset = offset,
                      .data = data};
}

SIM_API int aclDestroyTensor(const Tensor* tensor) {
    delete tensor;
    return 0;
}

SIM_API Scalar* aclCreateScalar(const void* value, int type) {
    return new Scalar{.value = ops::load(static_cast<const std::byte*>(value), type)};
}

SIM_API int aclDestroyScalar(const Scalar* scalar) {
    delete scalar;
    return 0;
}
