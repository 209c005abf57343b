// 16 lanes in two AVX2 registers; see simd_avx512.h for what each name means.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

namespace outpace {
namespace OUTPACE_NS {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
using W = I;
struct M {
    __m256 a, b;
};

constexpr int kTile = 4;
constexpr int kTogether = 1;
constexpr int kQueries = 2;
constexpr int kVectors = 2;

INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE M less(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
INLINE M is_nan(F x) { return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)}; }
INLINE bool any(M m) { return _mm256_movemask_ps(_mm256_or_ps(m.a, m.b)) != 0; }
INLINE F select(M m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }

INLINE I set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I add_i(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I xor_i(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
INLINE I load_i(const uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
INLINE void store_i(uint32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
struct Product {
    I high, low;
};
INLINE Product mul_wide(I x, uint32_t c) {
    const __m256i by = _mm256_set1_epi64x(c);
    const auto half = [&](__m256i v, __m256i& high, __m256i& low) {
        const __m256i even = _mm256_mul_epu32(v, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), by);
        high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
        low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    };
    Product p;
    half(x.a, p.high.a, p.low.a);
    half(x.b, p.high.b, p.low.b);
    return p;
}
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE F times_pow2(F x, I n) {
    const I bits = add_i({_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}, {_mm256_slli_epi32(n.a, 23), _mm256_slli_epi32(n.b, 23)});
    return {_mm256_castsi256_ps(bits.a), _mm256_castsi256_ps(bits.b)};
}

INLINE __m128i half_load(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE F load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(half_load(p)), _mm256_cvtph_ps(half_load(p + 8))}; }
INLINE F load_bf16(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half_load(p)), 16)),
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half_load(p + 8)), 16))};
}
INLINE F load_u8(const uint8_t* p) {
    const __m128i x = half_load(p);
    return to_float({_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))});
}
INLINE F load_i8(const uint8_t* p) {
    const __m128i x = half_load(p);
    return to_float({_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}
INLINE F pair_low(I x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))}; }
INLINE F pair_high(I x) {
    const __m256i m = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(x.a, m)), _mm256_castsi256_ps(_mm256_and_si256(x.b, m))};
}
INLINE W load_w(const uint8_t* p) { return load_i(reinterpret_cast<const uint32_t*>(p)); }
INLINE W and_w(W w, int mask) {
    const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
    return {_mm256_and_si256(w.a, m), _mm256_and_si256(w.b, m)};
}
INLINE W low_nibbles(W w) { return and_w(w, 0x0F); }
INLINE W high_nibbles(W w) { return and_w({_mm256_srli_epi16(w.a, 4), _mm256_srli_epi16(w.b, 4)}, 0x0F); }
INLINE W low_nibbles_16(W w) { return and_w({_mm256_slli_epi16(w.a, 4), _mm256_slli_epi16(w.b, 4)}, 0xF0); }
INLINE W high_nibbles_16(W w) { return and_w(w, 0xF0); }
template <bool high, int left, int mask>
INLINE W with_planes(W w, W planes) {
    if (left > 0) planes = {_mm256_slli_epi16(planes.a, left > 0 ? left : 0), _mm256_slli_epi16(planes.b, left > 0 ? left : 0)};
    if (left < 0) planes = {_mm256_srli_epi16(planes.a, left < 0 ? -left : 0), _mm256_srli_epi16(planes.b, left < 0 ? -left : 0)};
    const W upper = and_w(planes, mask), lower = high ? high_nibbles(w) : low_nibbles(w);
    return {_mm256_or_si256(lower.a, upper.a), _mm256_or_si256(lower.b, upper.b)};
}
INLINE W add_w(W w, int x) {
    const __m256i by = _mm256_set1_epi8(static_cast<char>(x));
    return {_mm256_add_epi8(w.a, by), _mm256_add_epi8(w.b, by)};
}
INLINE W look_up(W w, const uint8_t* table) {
    const __m256i of = _mm256_broadcastsi128_si256(half_load(table));
    return {_mm256_shuffle_epi8(of, w.a), _mm256_shuffle_epi8(of, w.b)};
}

#ifdef __AVXVNNI__
INLINE I dot4(I acc, W w, const uint8_t* a) {
    const I x = set1_i(int_at(a));
    return {_mm256_dpbusd_avx_epi32(acc.a, w.a, x.a), _mm256_dpbusd_avx_epi32(acc.b, w.b, x.b)};
}
#else
#define OUTPACE_MADDUBS  // dot16 instead of dot4
// Products in pairs, each pair in 16 bits: 2 * 128 * 127 fits, since |a| <= 127. `negative`: bytes are 128 too high; the sign
// of what they stand for moves to `a`, as one operand must be unsigned.
template <bool negative>
INLINE __m256i pairs(__m256i w, __m256i a) {
    if (!negative) return _mm256_maddubs_epi16(w, a);
    w = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
}
// Sums of four vectors' pairs. `small`: no value is beyond 32, and 8 * 32 * 127 still fits 16 bits.
template <bool small>
INLINE __m256i sum_pairs(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (small) return _mm256_madd_epi16(_mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d)), ones);
    return _mm256_add_epi32(_mm256_add_epi32(_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)),
        _mm256_add_epi32(_mm256_madd_epi16(c, ones), _mm256_madd_epi16(d, ones)));
}
// Sums over 16 inputs: q[4] by a[16].
template <bool small, bool negative>
INLINE I dot16(const W* q, const uint8_t* a) {
    const __m256i x[] = {set1_i(int_at(a)).a, set1_i(int_at(a + 4)).a, set1_i(int_at(a + 8)).a, set1_i(int_at(a + 12)).a};
    return {sum_pairs<small>(
                pairs<negative>(q[0].a, x[0]), pairs<negative>(q[1].a, x[1]), pairs<negative>(q[2].a, x[2]), pairs<negative>(q[3].a, x[3])),
        sum_pairs<small>(
            pairs<negative>(q[0].b, x[0]), pairs<negative>(q[1].b, x[1]), pairs<negative>(q[2].b, x[2]), pairs<negative>(q[3].b, x[3]))};
}
INLINE I times_16(I x) { return {_mm256_slli_epi32(x.a, 4), _mm256_slli_epi32(x.b, 4)}; }
#endif

INLINE float sum(F x) {
    const __m256 a = _mm256_add_ps(x.a, x.b);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
INLINE float peak(F x) {
    const __m256 a = _mm256_max_ps(x.a, x.b);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
INLINE int32_t sum_i(I x) {
    const __m256i a = _mm256_add_epi32(x.a, x.b);
    const __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i c = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xB1)));
}
INLINE void store_woven(float* p, F even, F odd) {
    const auto weave = [](float* to, __m256 x, __m256 y) {
        const __m256 low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
        _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
        _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
    };
    weave(p, even.a, odd.a);
    weave(p + 16, even.b, odd.b);
}
INLINE void store_i8(uint8_t* p, I x) {
    const __m128i lo = _mm_packs_epi32(_mm256_castsi256_si128(x.a), _mm256_extracti128_si256(x.a, 1));
    const __m128i hi = _mm_packs_epi32(_mm256_castsi256_si128(x.b), _mm256_extracti128_si256(x.b, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(lo, hi));
}

}  // namespace OUTPACE_NS
}  // namespace outpace
