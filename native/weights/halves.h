// float16 and bfloat16 as 16-bit integers, converted without hardware help. Both directions are exact or rounded to
// nearest, ties to even. `static`, so that each translation unit keeps its own copy, compiled with its own flags.
#pragma once

#include <cstdint>
#include <cstring>

namespace outpace {

static inline uint16_t u16_at(const uint8_t* p) {
    uint16_t x;
    std::memcpy(&x, p, 2);
    return x;
}

static inline int32_t int_at(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

static inline float float_at(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
}

static inline float bits_to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

static inline float bf16_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }

// The bfloat16 nearest to x, as the upper half of a float's bits.
static inline uint32_t bf16_in_float(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    return ((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x400000u : rounded) & 0xFFFF0000u;  // NaN stays NaN
}

static inline uint16_t float_to_bf16(float x) { return static_cast<uint16_t>(bf16_in_float(x) >> 16); }

static inline float f16_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1Fu, mantissa = h & 0x3FFu;
    if (exponent == 31) return bits_to_float(sign | 0x7F800000u | (mantissa << 13));
    if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float small = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal or zero: exact
    return bits_to_float(sign | float_to_bits(small));
}

static inline uint16_t float_to_f16(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds beyond 65504
    if (magnitude < 0x38800000u) {  // subnormal: let the adder round at 2^-24
        const float rounded = bits_to_float(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (float_to_bits(rounded) - 0x3F000000u));
    }
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace outpace
