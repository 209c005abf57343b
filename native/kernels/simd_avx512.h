// 16 lanes in one AVX-512 register. Included inside a translation unit compiled with its own -m flags; every name lives
// in OUTPACE_NS, so that no inline function of one path can be linked into another.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

namespace outpace {
namespace OUTPACE_NS {

using F = __m512;     // 16 x float
using I = __m512i;    // 16 x int32
using W = __m512i;    // 64 x uint8: 16 rows by 4 inputs
using M = __mmask16;  // one truth value a lane
struct Quad {         // 4 bytes, at any address
    uint8_t bytes[4];
};

constexpr int kTile = 16;    // most tokens of a register tile
constexpr int kTogether = 4;  // of them, whose operations are interleaved
constexpr int kQueries = 6;  // most queries of an attention tile
constexpr int kVectors = 4;  // and of its vectors: 24 sums, 4 operands, 1 broadcast

INLINE F set1(float x) { return _mm512_set1_ps(x); }
INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F abs(F a) { return _mm512_abs_ps(a); }
INLINE M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE bool any(M m) { return m != 0; }
INLINE F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }

INLINE I set1_i(int32_t x) { return _mm512_set1_epi32(x); }
INLINE I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I xor_i(I a, I b) { return _mm512_xor_si512(a, b); }
INLINE I load_i(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE void store_i(uint32_t* p, I x) { _mm512_storeu_si512(p, x); }
// Both halves of the 64-bit products of unsigned lanes with `c`.
struct Product {
    I high, low;
};
INLINE Product mul_wide(I x, uint32_t c) {
    const I by = _mm512_set1_epi64(c);
    const I even = _mm512_mul_epu32(x, by), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), by);
    return {_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd),
        _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32))};
}
INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I to_int(F a) { return _mm512_cvtps_epi32(a); }  // to nearest, ties to even
// x * 2^n for a normal x whose product is normal: n is added to the exponent.
INLINE F times_pow2(F x, I n) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(n, 23))); }

INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
INLINE F load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE F load_u8(const uint8_t* p) { return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
INLINE F load_i8(const uint8_t* p) { return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
INLINE F pair_low(I x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
INLINE F pair_high(I x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000u)))); }
INLINE W load_w(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE W low_nibbles(W w) { return _mm512_and_si512(w, _mm512_set1_epi8(0x0F)); }
INLINE W high_nibbles(W w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(0x0F)); }
// The same nibbles times 16, so that subtracting 128 means subtracting 8.
INLINE W low_nibbles_16(W w) { return _mm512_and_si512(_mm512_slli_epi16(w, 4), _mm512_set1_epi8(static_cast<char>(0xF0))); }
INLINE W high_nibbles_16(W w) { return _mm512_and_si512(w, _mm512_set1_epi8(static_cast<char>(0xF0))); }
// The low (or high) nibbles of `w` under the bits `mask` of `planes` shifted left by `left` (right where negative).
template <bool high, int left, int mask>
INLINE W with_planes(W w, W planes) {
    if (high) w = _mm512_srli_epi16(w, 4);
    if (left > 0) planes = _mm512_slli_epi16(planes, left > 0 ? left : 0);
    if (left < 0) planes = _mm512_srli_epi16(planes, left < 0 ? -left : 0);
    planes = _mm512_and_si512(planes, _mm512_set1_epi8(mask));
    return _mm512_ternarylogic_epi32(w, _mm512_set1_epi8(0x0F), planes, 0xEA);  // (w & 15) | planes
}
INLINE W add_w(W w, int x) { return _mm512_add_epi8(w, _mm512_set1_epi8(static_cast<char>(x))); }
// Each byte of `w`, 0 to 15, becomes that one of the 16 bytes at `table`.
INLINE W look_up(W w, const uint8_t* table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), w);
}
// acc[row] += sum over b of w[4 row + b] * a[b]. Spelled out, since not every compiler reads `a` from within the
// instruction: a load of its own for each would fill the front end.
INLINE I dot4(I acc, W w, const uint8_t* a) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const Quad*>(a)));
    return acc;
}

// Sums of lanes in one fixed order on every path: lane i with i + 8, then + 4, + 2, + 1.
INLINE float sum(F x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
INLINE float peak(F x) { return _mm512_reduce_max_ps(x); }
INLINE int32_t sum_i(I x) { return _mm512_reduce_add_epi32(x); }
// Stores even[0], odd[0], even[1], ...: 32 floats.
INLINE void store_woven(float* p, F even, F odd) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    store(p, _mm512_permutex2var_ps(even, low, odd));
    store(p + 16, _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd));
}
// Stores 16 int32 of -128 .. 127 as bytes.
INLINE void store_i8(uint8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }

}  // namespace OUTPACE_NS
}  // namespace outpace
