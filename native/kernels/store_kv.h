// One token's key and value into the cache's layout; see attention.h.
#pragma once

#include "weights/halves.h"
#include "kernels/simd.h"
#include "kernels/table.h"

namespace outpace {
namespace OUTPACE_NS {

static void put_key(const float* k, int dim, int dim_padded, bool f32, uint8_t* keys, int slot) {
    uint32_t* tile = reinterpret_cast<uint32_t*>(keys) + static_cast<int64_t>(slot / 16) * 16 * (f32 ? dim_padded : dim_padded / 2);
    uint32_t* at = tile + slot % 16;
    if (f32) {
        for (int d = 0; d < dim_padded; ++d) at[16 * d] = d < dim ? float_to_bits(k[d]) : 0;
        return;
    }
    uint32_t pairs[kMaxHead / 2];
    for (int d = 0; d < dim; d += 2)
        pairs[d / 2] = float_to_bf16(k[d]) | static_cast<uint32_t>(float_to_bf16(k[d + 1])) << 16;
    for (int d = dim; d < dim_padded; d += 2) pairs[d / 2] = 0;
    for (int i = 0; i < dim_padded / 2; ++i) at[16 * i] = pairs[i];
}

static void put_value(const float* v, int dim, int dim_padded, bool f32, uint8_t* values, int slot) {
    if (f32) {
        float* at = reinterpret_cast<float*>(values) + static_cast<int64_t>(slot) * dim_padded;
        for (int d = 0; d < dim_padded; ++d) at[d] = d < dim ? v[d] : 0.0f;
        return;
    }
    uint16_t* at = reinterpret_cast<uint16_t*>(values) + static_cast<int64_t>(slot) * dim_padded;
    for (int d = 0; d < dim; ++d) at[d] = float_to_bf16(v[d]);
    for (int d = dim; d < dim_padded; ++d) at[d] = 0;
}

}  // namespace OUTPACE_NS
}  // namespace outpace
