// 16 lanes in arrays, in plain C++; see simd_avx512.h for what each name means. Compilers vectorise these loops for
// whatever they target.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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
constexpr int kDirect = 1;

#define LANES for (int i = 0; i < 16; ++i)

INLINE F set1(float x) { F r; LANES r.v[i] = x; return r; }
INLINE F zero() { return set1(0.0f); }
INLINE F load(const float* p) { F r; std::memcpy(r.v, p, 64); return r; }
INLINE void store(float* p, F x) { std::memcpy(p, x.v, 64); }
INLINE F add(F a, F b) { LANES a.v[i] += b.v[i]; return a; }
INLINE F sub(F a, F b) { LANES a.v[i] -= b.v[i]; return a; }
INLINE F mul(F a, F b) { LANES a.v[i] *= b.v[i]; return a; }
INLINE F div(F a, F b) { LANES a.v[i] /= b.v[i]; return a; }
INLINE F fma(F a, F b, F c) { LANES c.v[i] += a.v[i] * b.v[i]; return c; }
INLINE F max(F a, F b) { LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE F min(F a, F b) { LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE F abs(F a) { LANES a.v[i] = std::fabs(a.v[i]); return a; }
INLINE M less(F a, F b) { M r; LANES r.v[i] = a.v[i] < b.v[i]; return r; }
INLINE M is_nan(F a) { M r; LANES r.v[i] = a.v[i] != a.v[i]; return r; }
INLINE bool any(M m) { bool r = false; LANES r = r || m.v[i]; return r; }
INLINE F select(M m, F yes, F no) { LANES no.v[i] = m.v[i] ? yes.v[i] : no.v[i]; return no; }

INLINE I set1_i(int32_t x) { I r; LANES r.v[i] = x; return r; }
INLINE I zero_i() { return set1_i(0); }
INLINE I add_i(I a, I b) { LANES a.v[i] += b.v[i]; return a; }
INLINE I xor_i(I a, I b) { LANES a.v[i] ^= b.v[i]; return a; }
INLINE I load_i(const uint32_t* p) { I r; std::memcpy(r.v, p, 64); return r; }
INLINE void store_i(uint32_t* p, I x) { std::memcpy(p, x.v, 64); }
struct Product {
    I high, low;
};
INLINE Product mul_wide(I x, uint32_t c) {
    Product p;
    LANES {
        const uint64_t whole = static_cast<uint64_t>(static_cast<uint32_t>(x.v[i])) * c;
        p.high.v[i] = static_cast<int32_t>(static_cast<uint32_t>(whole >> 32));
        p.low.v[i] = static_cast<int32_t>(static_cast<uint32_t>(whole));
    }
    return p;
}
INLINE F to_float(I a) { F r; LANES r.v[i] = static_cast<float>(a.v[i]); return r; }
// Adding and taking away 1.5 * 2^23 rounds to nearest, ties to even, for |x| < 2^22; NaN becomes 0.
INLINE I to_int(F a) {
    I r;
    LANES {
        const float rounded = (a.v[i] + 12582912.0f) - 12582912.0f;
        r.v[i] = rounded > -4194304.0f && rounded < 4194304.0f ? static_cast<int32_t>(rounded) : 0;
    }
    return r;
}
INLINE F pow2(I n) {
    F r;
    LANES {
        const uint32_t bits = static_cast<uint32_t>(n.v[i] + 127) << 23;
        std::memcpy(&r.v[i], &bits, 4);
    }
    return r;
}

INLINE F load_f16(const uint16_t* p) { F r; LANES r.v[i] = f16_to_float(p[i]); return r; }
INLINE F load_bf16(const uint16_t* p) { F r; LANES r.v[i] = bf16_to_float(p[i]); return r; }
INLINE F load_u8(const uint8_t* p) { F r; LANES r.v[i] = p[i]; return r; }
INLINE F load_i8(const uint8_t* p) { F r; LANES r.v[i] = static_cast<int8_t>(p[i]); return r; }
INLINE I load_pairs(const void* p) { I r; std::memcpy(r.v, p, 64); return r; }
INLINE I set1_pair(const void* p) { int32_t x; std::memcpy(&x, p, 4); return set1_i(x); }
INLINE F pair_low(I x) { F r; LANES r.v[i] = bf16_to_float(static_cast<uint16_t>(x.v[i])); return r; }
INLINE F pair_high(I x) {
    F r;
    LANES r.v[i] = bf16_to_float(static_cast<uint16_t>(static_cast<uint32_t>(x.v[i]) >> 16));
    return r;
}
constexpr bool kDotPairs = false;
INLINE F dot_pairs(I a, I b, F c) { return fma(pair_high(a), pair_high(b), fma(pair_low(a), pair_low(b), c)); }

INLINE W load_w(const uint8_t* p) { W r; std::memcpy(r.v, p, 64); return r; }
#define BYTES for (int i = 0; i < 64; ++i)
INLINE W low_nibbles(W w) { BYTES w.v[i] &= 0x0F; return w; }
INLINE W high_nibbles(W w) { BYTES w.v[i] >>= 4; return w; }
INLINE W low_nibbles_16(W w) { BYTES w.v[i] = static_cast<uint8_t>(w.v[i] << 4); return w; }
INLINE W high_nibbles_16(W w) { BYTES w.v[i] &= 0xF0; return w; }
template <bool high, int left, int mask>
INLINE W with_planes(W w, W planes) {
    w = high ? high_nibbles(w) : low_nibbles(w);
    BYTES {
        const int shifted = left > 0 ? planes.v[i] << (left > 0 ? left : 0) : planes.v[i] >> (left < 0 ? -left : 0);
        w.v[i] = static_cast<uint8_t>(w.v[i] | (shifted & mask));
    }
    return w;
}
INLINE W add_w(W w, int x) { BYTES w.v[i] = static_cast<uint8_t>(w.v[i] + x); return w; }
INLINE W look_up(W w, const uint8_t* table) { BYTES w.v[i] = table[w.v[i]]; return w; }
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
INLINE int32_t sum_i(I x) { int32_t r = 0; LANES r += x.v[i]; return r; }
INLINE void store_i8(uint8_t* p, I x) { LANES p[i] = static_cast<uint8_t>(x.v[i]); }

#undef LANES
#undef BYTES

}  // namespace OUTPACE_NS
}  // namespace outpace
