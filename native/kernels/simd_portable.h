// 16 lanes in arrays, in plain C++; see simd_avx512.h for what each name means. Compilers vectorise these loops for
// whatever they target.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "runtime/denormals.h"
#include "weights/halves.h"

#define INLINE static inline

namespace outpace {
namespace OUTPACE_NS {

struct F {
    float v[16];
};
struct I {
    int32_t v[16];
};
struct W {
    uint8_t v[64];
};
struct M {
    bool v[16];
};

constexpr int kTile = 2;
constexpr int kTogether = 1;
constexpr int kQueries = 1;
constexpr int kVectors = 4;

#define LANES for (int i = 0; i < 16; ++i)
// A function of vectors, by what it makes of lane (or byte) i.
#define OUTPACE_EACH(RESULT, NAME, GIVEN, LANE)                                                 \
    INLINE RESULT NAME GIVEN {                                                                  \
        RESULT r;                                                                               \
        for (int i = 0; i < static_cast<int>(sizeof r.v / sizeof r.v[0]); ++i) r.v[i] = (LANE); \
        return r;                                                                               \
    }
template <class V>
INLINE V copy_of(const void* p) {
    V r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}

OUTPACE_EACH(F, set1, (float x), x)
INLINE F load(const float* p) { return copy_of<F>(p); }
INLINE void store(float* p, F x) { std::memcpy(p, x.v, 64); }
OUTPACE_EACH(F, add, (F a, F b), a.v[i] + b.v[i])
OUTPACE_EACH(F, sub, (F a, F b), a.v[i] - b.v[i])
OUTPACE_EACH(F, mul, (F a, F b), times(a.v[i], b.v[i]))
OUTPACE_EACH(F, div, (F a, F b), over(a.v[i], b.v[i]))
#if defined(__FP_FAST_FMAF) || defined(__aarch64__)
OUTPACE_EACH(F, fma, (F a, F b, F c), fused(a.v[i], b.v[i], c.v[i]))
#else
// a * b + c rounded once, without the instruction. The product is exact in float64. Where their sum, rounded there, lies half
// way between two float32, rounding it again may err: then it is rounded to odd first, which makes the second rounding right
// (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
INLINE float round_once(double product, double c) {
    const double sum = product + c, rest = sum - product;
    const double lost = (product - (sum - rest)) + (c - rest);  // exact (Knuth's two-sum); NaN where the sum is not finite
    uint64_t bits, lost_bits;
    std::memcpy(&bits, &sum, 8);
    std::memcpy(&lost_bits, &lost, 8);
    const uint64_t even = ~bits & 1, down = (bits ^ lost_bits) >> 63;
    if (std::fabs(lost) > 0.0) bits += down ? 0 - even : even;
    double odd;
    std::memcpy(&odd, &bits, 8);
    return static_cast<float>(odd);
}
INLINE F fma(F a, F b, F c) {
    F r;
#ifdef __SSE2__  // the same in vectors, and `round_once` only if one of the 16 lies half way
    __m128i near = _mm_setzero_si128();
    const auto half = [&near](__m128 x, __m128 y, __m128 z) {
        const __m128d sum = _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(x), _mm_cvtps_pd(y)), _mm_cvtps_pd(z));
        const __m128i beyond = _mm_and_si128(_mm_castpd_si128(sum), _mm_set1_epi64x(0x1FFFFFFF));
        near = _mm_or_si128(near, _mm_cmpeq_epi32(beyond, _mm_set1_epi64x(0x10000000)));
        return _mm_cvtpd_ps(sum);
    };
    for (int i = 0; i < 16; i += 4) {
        const __m128 x = _mm_loadu_ps(a.v + i), y = _mm_loadu_ps(b.v + i), z = _mm_loadu_ps(c.v + i);
        const __m128 low = half(x, y, z), high = half(_mm_movehl_ps(x, x), _mm_movehl_ps(y, y), _mm_movehl_ps(z, z));
        _mm_storeu_ps(r.v + i, _mm_movelh_ps(low, high));
    }
    if ((_mm_movemask_epi8(near) & 0x0F0F) == 0) return r;  // the sums' lower words
#endif
    LANES r.v[i] = round_once(static_cast<double>(a.v[i]) * b.v[i], c.v[i]);
    return r;
}
#endif
OUTPACE_EACH(F, max, (F a, F b), a.v[i] > b.v[i] ? a.v[i] : b.v[i])
OUTPACE_EACH(F, min, (F a, F b), a.v[i] < b.v[i] ? a.v[i] : b.v[i])
OUTPACE_EACH(F, abs, (F a), std::fabs(a.v[i]))
OUTPACE_EACH(M, less, (F a, F b), a.v[i] < b.v[i])
OUTPACE_EACH(M, is_nan, (F a), a.v[i] != a.v[i])
INLINE bool any(M m) {
    bool r = false;
    LANES r = r || m.v[i];
    return r;
}
OUTPACE_EACH(F, select, (M m, F yes, F no), m.v[i] ? yes.v[i] : no.v[i])

OUTPACE_EACH(I, set1_i, (int32_t x), x)
OUTPACE_EACH(I, add_i, (I a, I b), a.v[i] + b.v[i])
OUTPACE_EACH(I, xor_i, (I a, I b), a.v[i] ^ b.v[i])
INLINE I load_i(const uint32_t* p) { return copy_of<I>(p); }
INLINE void store_i(uint32_t* p, I x) { std::memcpy(p, x.v, 64); }
struct Product {
    I high, low;
};
INLINE uint64_t wide(int32_t x, uint32_t c) { return static_cast<uint64_t>(static_cast<uint32_t>(x)) * c; }
OUTPACE_EACH(I, mul_high, (I x, uint32_t c), static_cast<int32_t>(wide(x.v[i], c) >> 32))
OUTPACE_EACH(I, mul_low, (I x, uint32_t c), static_cast<int32_t>(wide(x.v[i], c)))
INLINE Product mul_wide(I x, uint32_t c) { return {mul_high(x, c), mul_low(x, c)}; }
OUTPACE_EACH(F, to_float, (I a), static_cast<float>(a.v[i]))
// Adding and taking away 1.5 * 2^23 rounds to nearest, ties to even, for |x| < 2^22; NaN becomes 0.
OUTPACE_EACH(F, rounded, (F a), (a.v[i] + 12582912.0f) - 12582912.0f)
OUTPACE_EACH(I, small_int, (F a), a.v[i] > -4194304.0f && a.v[i] < 4194304.0f ? static_cast<int32_t>(a.v[i]) : 0)
INLINE I to_int(F a) { return small_int(rounded(a)); }
OUTPACE_EACH(F, times_pow2, (F x, I n), bits_to_float(float_to_bits(x.v[i]) + (static_cast<uint32_t>(n.v[i]) << 23)))

OUTPACE_EACH(F, load_f16, (const uint16_t* p), f16_to_float(p[i]))
OUTPACE_EACH(F, load_bf16, (const uint16_t* p), bf16_to_float(p[i]))
OUTPACE_EACH(F, load_u8, (const uint8_t* p), p[i])
OUTPACE_EACH(F, load_i8, (const uint8_t* p), static_cast<int8_t>(p[i]))
OUTPACE_EACH(F, pair_low, (I x), bf16_to_float(static_cast<uint16_t>(x.v[i])))
OUTPACE_EACH(F, pair_high, (I x), bf16_to_float(static_cast<uint16_t>(static_cast<uint32_t>(x.v[i]) >> 16)))
INLINE W load_w(const uint8_t* p) { return copy_of<W>(p); }
OUTPACE_EACH(W, low_nibbles, (W w), w.v[i] & 0x0F)
OUTPACE_EACH(W, high_nibbles, (W w), static_cast<uint8_t>(w.v[i] >> 4))
OUTPACE_EACH(W, low_nibbles_16, (W w), static_cast<uint8_t>(w.v[i] << 4))
OUTPACE_EACH(W, high_nibbles_16, (W w), w.v[i] & 0xF0)
OUTPACE_EACH(W, shifted, (W w, int left), static_cast<uint8_t>(left > 0 ? w.v[i] << left : w.v[i] >> -left))
OUTPACE_EACH(W, joined, (W low, W planes, int mask), static_cast<uint8_t>(low.v[i] | (planes.v[i] & mask)))
template <bool high, int left, int mask>
INLINE W with_planes(W w, W planes) {
    return joined(high ? high_nibbles(w) : low_nibbles(w), shifted(planes, left), mask);
}
OUTPACE_EACH(W, add_w, (W w, int x), static_cast<uint8_t>(w.v[i] + x))
OUTPACE_EACH(W, look_up, (W w, const uint8_t* table), table[w.v[i]])
INLINE I dot4(I acc, const W& w, const uint8_t* a) {
    const int32_t a0 = static_cast<int8_t>(a[0]), a1 = static_cast<int8_t>(a[1]);
    const int32_t a2 = static_cast<int8_t>(a[2]), a3 = static_cast<int8_t>(a[3]);
    LANES acc.v[i] += w.v[4 * i] * a0 + w.v[4 * i + 1] * a1 + w.v[4 * i + 2] * a2 + w.v[4 * i + 3] * a3;
    return acc;
}

INLINE float sum(F x) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    return x.v[0];
}
INLINE float peak(F x) {
    float r = x.v[0];
    LANES r = x.v[i] > r ? x.v[i] : r;
    return r;
}
INLINE int32_t sum_i(I x) {
    int32_t r = 0;
    LANES r += x.v[i];
    return r;
}
INLINE void store_woven(float* p, F even, F odd) { LANES p[2 * i] = even.v[i], p[2 * i + 1] = odd.v[i]; }
INLINE void store_i8(uint8_t* p, I x) { LANES p[i] = static_cast<uint8_t>(x.v[i]); }

#undef LANES
#undef OUTPACE_EACH

}  // namespace OUTPACE_NS
}  // namespace outpace
