// One token's key and value into the cache's layout; see kv_block.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/simd.h"
#include "kernels/table.h"
#include "runtime/denormals.h"
#include "weights/halves.h"

namespace outpace {
namespace OUTPACE_NS {

// x [n], n a multiple of 16, as int8 that are 128 too high: to the nearest, ties to even. Returns what multiplies them: the
// largest magnitude is 127.
static float to_int8(const float* x, int n, uint8_t* out) {
    constexpr float most = 127.0f;
    F size = zero();
    for (int d = 0; d < n; d += 16) size = max(abs(load(x + d)), size);
    const float largest = peak(size);
    const F inverse = set1(largest > 0.0f ? most / largest : 0.0f);
    for (int d = 0; d < n; d += 16) store_i8(out + d, to_int(min(max(mul(load(x + d), inverse), set1(-most)), set1(most))));
    for (int d = 0; d < n; ++d) out[d] = static_cast<uint8_t>(out[d] + 128);
    return over(largest, most);
}

// The float16 nearest to x, within +-65504: beyond that an infinity would make NaN of a score. NaN stays NaN.
static uint16_t to_f16(float x) { return float_to_f16(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

// x [32] as nibbles 8 too high, times a float16: the number of largest magnitude is -8 times it, as in GGUF's Q4_0.
static uint16_t to_nibbles(const float* x, uint8_t* out) {
    float furthest = 0.0f;
    for (int i = 0; i < 32; ++i)
        if (std::fabs(x[i]) > std::fabs(furthest)) furthest = x[i];
    const uint16_t half = to_f16(times(furthest, -0.125f));
    const float scale = f16_to_float(half);
    const F inverse = set1(std::fabs(scale) > 0.0f ? 1.0f / scale : 0.0f);
    for (int i = 0; i < 32; i += 16) store_i8(out + i, to_int(min(max(mul(load(x + i), inverse), set1(-8.0f)), set1(7.0f))));
    for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(out[i] + 8);
    return half;
}

// A key or value as integers, and their scales, into a slot; see kv_integers.h.
static void put_integers(const float* x, int dim, int dim_padded, KVType type, bool key, uint8_t* part, int slot) {
    alignas(64) float line[kMaxHead + 16]{};
    std::copy(x, x + dim, line);
    const int row = kv_row_bytes(type, dim_padded), count = groups(type, dim_padded);
    uint8_t* scales = part + kBlock * row;
    uint8_t bytes[kMaxHead + 16];
    for (int g = 0; g < count && type == KVType::I4; ++g) {
        uint8_t nibbles[32];
        const uint16_t scale = to_nibbles(line + 32 * g, nibbles);
        std::memcpy(scales + 2 * (g * kBlock + slot), &scale, 2);
        for (int i = 0; i < 16; ++i) bytes[16 * g + i] = static_cast<uint8_t>(nibbles[i] | nibbles[16 + i] << 4);
    }
    if (type == KVType::I8) {
        const float scale = to_int8(line, dim_padded, bytes);
        std::memcpy(scales + 4 * slot, &scale, 4);
    }
    for (int i = 0; i < row; ++i) part[integer_at(key, slot, i, row)] = bytes[i];
}

static void put_key(const float* k, int dim, int dim_padded, KVType type, uint8_t* keys, int slot) {
    if (integers(type)) return put_integers(k, dim, dim_padded, type, true, keys, slot);
    uint8_t* tile = keys + static_cast<int64_t>(slot / 16) * 16 * dim_padded * element_bytes(type);
    if (type == KVType::F16) {
        uint16_t* at = reinterpret_cast<uint16_t*>(tile) + slot % 16;
        for (int d = 0; d < dim_padded; ++d) at[16 * d] = d < dim ? to_f16(k[d]) : 0;
        return;
    }
    uint32_t* at = reinterpret_cast<uint32_t*>(tile) + slot % 16;
    if (type == KVType::F32) {
        for (int d = 0; d < dim_padded; ++d) at[16 * d] = d < dim ? float_to_bits(k[d]) : 0;
        return;
    }
    uint32_t pairs[kMaxHead / 2];
    for (int d = 0; d < dim; d += 2) pairs[d / 2] = float_to_bf16(k[d]) | static_cast<uint32_t>(float_to_bf16(k[d + 1])) << 16;
    for (int d = dim; d < dim_padded; d += 2) pairs[d / 2] = 0;
    for (int i = 0; i < dim_padded / 2; ++i) at[16 * i] = pairs[i];
}

static void put_value(const float* v, int dim, int dim_padded, KVType type, uint8_t* values, int slot) {
    if (integers(type)) return put_integers(v, dim, dim_padded, type, false, values, slot);
    if (type == KVType::F32) {
        float* at = reinterpret_cast<float*>(values) + static_cast<int64_t>(slot) * dim_padded;
        for (int d = 0; d < dim_padded; ++d) at[d] = d < dim ? v[d] : 0.0f;
        return;
    }
    uint16_t* at = reinterpret_cast<uint16_t*>(values) + static_cast<int64_t>(slot) * dim_padded;
    for (int d = 0; d < dim; ++d) at[d] = type == KVType::F16 ? to_f16(v[d]) : float_to_bf16(v[d]);
    for (int d = dim; d < dim_padded; ++d) at[d] = 0;
}

}  // namespace OUTPACE_NS
}  // namespace outpace
