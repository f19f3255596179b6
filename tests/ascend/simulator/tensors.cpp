#include "tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace ops {
namespace {

enum Type {
    kFloat = 0,
    kHalf = 1,
    kInt8 = 2,
    kInt32 = 3,
    kUint8 = 4,
    kInt16 = 6,
    kUint16 = 7,
    kUint32 = 8,
    kInt64 = 9,
    kUint64 = 10,
    kDouble = 11,
    kBool = 12,
    kBfloat16 = 27,
};

float half_to_float(uint16_t bits) {
    const int exponent = bits >> 10 & 0x1f;
    const int mantissa = bits & 0x3ff;
    float value = 0;
    if (exponent == 0) {
        value = std::ldexp(static_cast<float>(mantissa), -24);
    } else if (exponent == 31) {
        value = mantissa == 0 ? INFINITY : NAN;
    } else {
        value = std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25);
    }
    return (bits & 0x8000) != 0 ? -value : value;
}

// Rounds to the nearest, ties to even.
uint16_t float_to_half(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) {
        return sign | 0x7e00;
    }
    if (size >= 65520.0F) {
        return sign | 0x7c00;
    }
    int exponent = 0;
    (void)std::frexp(size, &exponent);
    const int shift = std::max(exponent - 11, -24);  // what the last of 11 bits is worth
    const auto units = static_cast<uint16_t>(std::nearbyint(std::ldexp(size, -shift)));
    if (units >= 0x800) {
        return static_cast<uint16_t>(sign | ((shift + 26) << 10));
    }
    return units < 0x400 ? sign | units
                         : static_cast<uint16_t>(sign | ((shift + 25) << 10) | (units & 0x3ff));
}

uint16_t float_to_bfloat16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) {
        return 0x7fc0;
    }
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename T>
T read(const std::byte* at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
}

template <typename T>
void write(std::byte* at, T value) {
    std::memcpy(at, &value, sizeof(T));
}

}  // namespace

size_t item_bytes(int type) {
    switch (type) {
        case kInt8:
        case kUint8:
        case kBool:
            return 1;
        case kHalf:
        case kInt16:
        case kUint16:
        case kBfloat16:
            return 2;
        case kFloat:
        case kInt32:
        case kUint32:
            return 4;
        case kInt64:
        case kUint64:
        case kDouble:
            return 8;
        default:
            return 0;
    }
}

long double load(const std::byte* at, int type) {
    switch (type) {
        case kFloat:
            return read<float>(at);
        case kHalf:
            return half_to_float(read<uint16_t>(at));
        case kBfloat16:
            return std::bit_cast<float>(static_cast<uint32_t>(read<uint16_t>(at)) << 16);
        case kInt8:
            return read<int8_t>(at);
        case kUint8:
            return read<uint8_t>(at);
        case kBool:
            return read<uint8_t>(at) != 0 ? 1 : 0;
        case kInt16:
            return read<int16_t>(at);
        case kUint16:
            return read<uint16_t>(at);
        case kInt32:
            return read<int32_t>(at);
        case kUint32:
            return read<uint32_t>(at);
        case kInt64:
            return static_cast<long double>(read<int64_t>(at));
        case kUint64:
            return static_cast<long double>(read<uint64_t>(at));
        case kDouble:
            return read<double>(at);
        default:
            return 0;
    }
}

void store(std::byte* at, int type, long double value) {
    switch (type) {
        case kFloat:
            write(at, static_cast<float>(value));
            break;
        case kHalf:
            write(at, float_to_half(static_cast<float>(value)));
            break;
        case kBfloat16:
            write(at, float_to_bfloat16(static_cast<float>(value)));
            break;
        case kInt8:
            write(at, static_cast<int8_t>(static_cast<int64_t>(value)));
            break;
        case kUint8:
            write(at, static_cast<uint8_t>(static_cast<int64_t>(value)));
            break;
        case kBool:
            write(at, static_cast<uint8_t>(value != 0 ? 1 : 0));
            break;
        case kInt16:
            write(at, static_cast<int16_t>(static_cast<int64_t>(value)));
            break;
        case kUint16:
            write(at, static_cast<uint16_t>(static_cast<int64_t>(value)));
            break;
        case kInt32:
            write(at, static_cast<int32_t>(static_cast<int64_t>(value)));
            break;
        case kUint32:
            write(at, static_cast<uint32_t>(static_cast<int64_t>(value)));
            break;
        case kInt64:
            write(at, static_cast<int64_t>(value));
            break;
        case kUint64:
            write(at, static_cast<uint64_t>(value));
            break;
        case kDouble:
            write(at, static_cast<double>(value));
            break;
        default:
            break;
    }
}

int64_t num_items(const Tensor& tensor) {
    int64_t num = 1;
    for (const int64_t size : tensor.sizes) {
        num *= size;
    }
    return num;
}

Extent extent_of(const Tensor& tensor) {
    const size_t item = item_bytes(tensor.type);
    if (num_items(tensor) == 0 || item == 0) {
        return {};
    }
    int64_t last = 0;
    for (size_t i = 0; i < tensor.sizes.size(); ++i) {
        last += (tensor.sizes[i] - 1) * tensor.strides[i];
    }
    return {
        .start = static_cast<std::byte*>(tensor.data) + static_cast<size_t>(tensor.offset) * item,
        .size_bytes = (static_cast<size_t>(last) + 1) * item};
}

void for_each(const Tensor& tensor, const std::function<void(size_t)>& visit) {
    const size_t item = item_bytes(tensor.type);
    const int64_t num = num_items(tensor);
    std::vector<int64_t> index(tensor.sizes.size(), 0);
    int64_t at = 0;
    for (int64_t i = 0; i < num; ++i) {
        visit(static_cast<size_t>(at) * item);
        for (size_t d = index.size(); d-- > 0;) {
            at += tensor.strides[d];
            if (++index[d] < tensor.sizes[d]) {
                break;
            }
            at -= index[d] * tensor.strides[d];
            index[d] = 0;
        }
    }
}

size_t num_dense_dims(const Tensor& tensor) {
    int64_t items = 1;
    size_t num = 0;
    for (size_t d = tensor.sizes.size();
         d-- > 0 && (tensor.strides[d] == items || tensor.sizes[d] == 1); ++num) {
        items *= tensor.sizes[d];
    }
    return num;
}

Tensor without_last(const Tensor& tensor, size_t num_dims) {
    Tensor outer = tensor;
    outer.sizes.resize(tensor.sizes.size() - num_dims);
    outer.strides.resize(outer.sizes.size());
    return outer;
}

}  // namespace ops
