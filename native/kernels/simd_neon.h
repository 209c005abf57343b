// 16 lanes in four NEON registers; see simd_avx512.h for what each name means.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

namespace outpace {
namespace OUTPACE_NS {

struct F {
    float32x4_t v[4];
};
struct I {
    int32x4_t v[4];
};
struct W {
    uint8x16_t v[4];
};
struct M {
    uint32x4_t v[4];
};

constexpr int kTile = 4;
constexpr int kTogether = 1;
constexpr int kQueries = 2;
constexpr int kVectors = 2;

// A function of vectors, by what it makes of register i.
#define OUTPACE_EACH(RESULT, NAME, GIVEN, PART)                                         \
    INLINE RESULT NAME GIVEN {                                                          \
        const auto part = [&](int i) __attribute__((always_inline)) { return (PART); }; \
        return {{part(0), part(1), part(2), part(3)}};                                  \
    }

OUTPACE_EACH(F, set1, (float x), (static_cast<void>(i), vdupq_n_f32(x)))
OUTPACE_EACH(F, load, (const float* p), vld1q_f32(p + 4 * i))
INLINE void store(float* p, F x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
OUTPACE_EACH(F, add, (F x, F y), vaddq_f32(x.v[i], y.v[i]))
OUTPACE_EACH(F, sub, (F x, F y), vsubq_f32(x.v[i], y.v[i]))
OUTPACE_EACH(F, mul, (F x, F y), vmulq_f32(x.v[i], y.v[i]))
OUTPACE_EACH(F, div, (F x, F y), vdivq_f32(x.v[i], y.v[i]))
OUTPACE_EACH(F, fma, (F x, F y, F z), vfmaq_f32(z.v[i], x.v[i], y.v[i]))
// The second where the two are equal or one is NaN, as x86 has it: fmax and fmin would be NaN.
OUTPACE_EACH(F, max, (F x, F y), vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]))
OUTPACE_EACH(F, min, (F x, F y), vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]))
OUTPACE_EACH(F, abs, (F x), vabsq_f32(x.v[i]))
OUTPACE_EACH(M, less, (F x, F y), vcltq_f32(x.v[i], y.v[i]))
OUTPACE_EACH(M, is_nan, (F x), vmvnq_u32(vceqq_f32(x.v[i], x.v[i])))
INLINE bool any(M m) { return vmaxvq_u32(vorrq_u32(vorrq_u32(m.v[0], m.v[1]), vorrq_u32(m.v[2], m.v[3]))) != 0; }
OUTPACE_EACH(F, select, (M m, F yes, F no), vbslq_f32(m.v[i], yes.v[i], no.v[i]))

OUTPACE_EACH(I, set1_i, (int32_t x), (static_cast<void>(i), vdupq_n_s32(x)))
OUTPACE_EACH(I, add_i, (I x, I y), vaddq_s32(x.v[i], y.v[i]))
OUTPACE_EACH(I, xor_i, (I x, I y), veorq_s32(x.v[i], y.v[i]))
OUTPACE_EACH(I, load_i, (const uint32_t* p), vreinterpretq_s32_u32(vld1q_u32(p + 4 * i)))
INLINE void store_i(uint32_t* p, I x) {
    for (int i = 0; i < 4; ++i) vst1q_u32(p + 4 * i, vreinterpretq_u32_s32(x.v[i]));
}
struct Product {
    I high, low;
};
INLINE int32x4_t mul_high(int32x4_t x, uint32_t c) {
    const uint32x4_t v = vreinterpretq_u32_s32(x);
    const uint64x2_t first = vmull_n_u32(vget_low_u32(v), c), second = vmull_high_n_u32(v, c);
    return vreinterpretq_s32_u32(vuzp2q_u32(vreinterpretq_u32_u64(first), vreinterpretq_u32_u64(second)));
}
OUTPACE_EACH(I, high_halves, (I x, uint32_t c), mul_high(x.v[i], c))
OUTPACE_EACH(I, low_halves, (I x, uint32_t c), vmulq_n_s32(x.v[i], static_cast<int32_t>(c)))
INLINE Product mul_wide(I x, uint32_t c) { return {high_halves(x, c), low_halves(x, c)}; }
OUTPACE_EACH(F, to_float, (I x), vcvtq_f32_s32(x.v[i]))
OUTPACE_EACH(I, to_int, (F x), vcvtnq_s32_f32(x.v[i]))
INLINE float32x4_t as_float(int32x4_t x) { return vreinterpretq_f32_s32(x); }
OUTPACE_EACH(F, times_pow2, (F x, I n), as_float(vaddq_s32(vreinterpretq_s32_f32(x.v[i]), vshlq_n_s32(n.v[i], 23))))

OUTPACE_EACH(F, load_f16, (const uint16_t* p), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))))
OUTPACE_EACH(F, load_bf16, (const uint16_t* p), vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)))
INLINE F widened(int16x8_t low, int16x8_t high) {
    return to_float({{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}});
}
INLINE F load_u8(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    return widened(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), vreinterpretq_s16_u16(vmovl_high_u8(x)));
}
INLINE F load_i8(const uint8_t* p) {
    const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
    return widened(vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x));
}
OUTPACE_EACH(F, pair_low, (I x), as_float(vshlq_n_s32(x.v[i], 16)))
OUTPACE_EACH(F, pair_high, (I x), as_float(vandq_s32(x.v[i], vdupq_n_s32(static_cast<int32_t>(0xFFFF0000u)))))
OUTPACE_EACH(W, load_w, (const uint8_t* p), vld1q_u8(p + 16 * i))
OUTPACE_EACH(W, low_nibbles, (W w), vandq_u8(w.v[i], vdupq_n_u8(0x0F)))
OUTPACE_EACH(W, high_nibbles, (W w), vshrq_n_u8(w.v[i], 4))
OUTPACE_EACH(W, low_nibbles_16, (W w), vshlq_n_u8(w.v[i], 4))
OUTPACE_EACH(W, high_nibbles_16, (W w), vandq_u8(w.v[i], vdupq_n_u8(0xF0)))
OUTPACE_EACH(W, joined, (W lower, W planes, int mask), vorrq_u8(lower.v[i], vandq_u8(planes.v[i], vdupq_n_u8(static_cast<uint8_t>(mask)))))
OUTPACE_EACH(W, shifted, (W w, int left), vshlq_u8(w.v[i], vdupq_n_s8(static_cast<int8_t>(left))))
template <bool high, int left, int mask>
INLINE W with_planes(W w, W planes) {
    return joined(high ? high_nibbles(w) : low_nibbles(w), shifted(planes, left), mask);
}
OUTPACE_EACH(W, add_w, (W w, int x), vaddq_u8(w.v[i], vdupq_n_u8(static_cast<uint8_t>(x))))
OUTPACE_EACH(W, look_up, (W w, const uint8_t* table), vqtbl1q_u8(vld1q_u8(table), w.v[i]))

INLINE int8x16_t four(const uint8_t* a) { return vreinterpretq_s8_s32(vdupq_n_s32(int_at(a))); }
#ifdef __ARM_FEATURE_MATMUL_INT8
OUTPACE_EACH(I, dot4, (I acc, W w, const uint8_t* a), vusdotq_s32(acc.v[i], w.v[i], four(a)))
#else
#define OUTPACE_SIGNED  // dot4 takes both operands signed
OUTPACE_EACH(I, dot4, (I acc, W w, const uint8_t* a), vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), four(a)))
#endif

INLINE float sum(F x) {
    const float32x4_t a = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
INLINE float peak(F x) { return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.v[0], x.v[1]), vmaxnmq_f32(x.v[2], x.v[3]))); }
INLINE int32_t sum_i(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3]))); }
INLINE void store_woven(float* p, F even, F odd) {
    for (int i = 0; i < 4; ++i) {
        const float32x4x2_t both = {{even.v[i], odd.v[i]}};  // Clang's vst2q_f32 is a macro
        vst2q_f32(p + 8 * i, both);
    }
}
INLINE void store_i8(uint8_t* p, I x) {
    const int16x8_t low = vmovn_high_s32(vmovn_s32(x.v[0]), x.v[1]), high = vmovn_high_s32(vmovn_s32(x.v[2]), x.v[3]);
    vst1q_u8(p, vreinterpretq_u8_s8(vmovn_high_s16(vmovn_s16(low), high)));
}

#undef OUTPACE_EACH

}  // namespace OUTPACE_NS
}  // namespace outpace
