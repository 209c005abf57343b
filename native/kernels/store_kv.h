// One token's key and value into the cache's layout; see kv_block.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/simd.h"
#include "kernels/table.h"
#include "runtime/denormals.h"
#include "weights/halves.h"

namespace outpace {
namespace OUTPACE_NS {

// x [dim] as int8 [dim_padded], to the nearest, ties to even; returns what multiplies them: the largest magnitude is 127.
static float to_int8(const float* x, int dim, int dim_padded, uint8_t* out) {
    alignas(64) float line[kMaxHead];
    std::copy(x, x + dim, line);
    std::fill(line + dim, line + dim_padded, 0.0f);
    F most = zero();
    for (int d = 0; d < dim_padded; d += 16) most = max(abs(load(line + d)), most);
    const float largest = peak(most);
    const F inverse = set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    for (int d = 0; d < dim_padded; d += 16) store_i8(out + d, to_int(min(max(mul(load(line + d), inverse), set1(-127.0f)), set1(127.0f))));
    return over(largest, 127.0f);
}

// The float16 nearest to x, within +-65504: beyond that an infinity would make NaN of a score. NaN stays NaN.
static uint16_t to_f16(float x) { return float_to_f16(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

static void put_scale(uint8_t* part, int dim_padded, int slot, float scale) {
    std::memcpy(part + kBlock * dim_padded + 4 * slot, &scale, 4);
}

static void put_key(const float* k, int dim, int dim_padded, KVType type, uint8_t* keys, int slot) {
    uint8_t* tile = keys + static_cast<int64_t>(slot / 16) * 16 * dim_padded * element_bytes(type);
    if (type == KVType::I8) {
        uint8_t bytes[kMaxHead];
        put_scale(keys, dim_padded, slot, to_int8(k, dim, dim_padded, bytes));
        for (int d = 0; d < dim_padded; ++d) tile[16 * d + slot % 16] = bytes[d];
        return;
    }
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
    if (type == KVType::I8) {
        put_scale(values, dim_padded, slot, to_int8(v, dim, dim_padded, values + static_cast<int64_t>(slot) * dim_padded));
        return;
    }
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
