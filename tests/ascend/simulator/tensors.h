// Tensors as operators see them, and their elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

struct Tensor {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    int type = 0;
    int64_t offset = 0;
    void* data = nullptr;
};

struct TensorList {
    std::vector<Tensor*> tensors;
};

struct Scalar {
    long double value = 0;  // holds every 64-bit integer
};

namespace ops {

// 0 for types that are not known.
size_t item_bytes(int type);
long double load(const std::byte* at, int type);
void store(std::byte* at, int type, long double value);

int64_t num_items(const Tensor& tensor);

// The bytes from the first element to the last.
struct Extent {
    std::byte* start = nullptr;
    size_t size_bytes = 0;
};
Extent extent_of(const Tensor& tensor);

// Visits the byte offsets of all elements from the extent's start, in order of the index.
void for_each(const Tensor& tensor, const std::function<void(size_t)>& visit);

// How many of the last dimensions lie without gaps, and the tensor without them: work on whole runs is much faster.
size_t num_dense_dims(const Tensor& tensor);
Tensor without_last(const Tensor& tensor, size_t num_dims);

}  // namespace ops
