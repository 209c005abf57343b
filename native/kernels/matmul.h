// Matrix products: 16 output rows by up to kTile tokens in registers. A row block's weights are unpacked once for all
// tokens of a tile, and its float sums are formed group after group along the inputs, for every token alike: neither
// the width, the tile nor the thread can show in a result.
#pragma once

#include <type_traits>

#include "kernels/range.h"
#include "kernels/simd.h"
#include "kernels/table.h"

namespace outpace {
namespace OUTPACE_NS {

constexpr int kAhead = 4096;  // bytes to prefetch ahead; a row block is read strictly forward

INLINE void prefetch(const uint8_t* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + kAhead + i, 0, 3);
}

INLINE float float_at(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
}
INLINE const uint16_t* halves_at(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

#ifdef OUTPACE_MADDUBS
constexpr bool kMaddubs = true;
#else
constexpr bool kMaddubs = false;
#endif

// What differs between the integer formats: how their numbers unpack; where they stand is layout.h's.
//   offset: bytes are 128 too high; split: a scale for each 16 inputs; small: no value is beyond 32; minimum: d q + m
template <Format format>
struct Unpack;

template <bool times_16>
INLINE void unpack_nibbles(const uint8_t* q, W* w) {
    for (int i = 0; i < 4; ++i) {
        const W v = load_w(q + 64 * i);
        w[i] = times_16 ? low_nibbles_16(v) : low_nibbles(v);
        w[i + 4] = times_16 ? high_nibbles_16(v) : high_nibbles(v);
    }
}
INLINE void unpack_bytes(const uint8_t* q, W* w) {
    for (int i = 0; i < 8; ++i) w[i] = load_w(q + 64 * i);
}
// Nibbles and a plane of fifth bits, or two of upper pairs of bits; `plus` is added to each byte.
template <int plus, int v>
INLINE W fives_vector(const uint8_t* q, W planes) {
    const W w = with_planes<(v > 3), 4 - v, 0x10>(load_w(q + 64 * (v % 4)), planes);
    return plus == 0 ? w : add_w(w, plus);
}
template <int plus, int... v>
INLINE void unpack_fives(Pack<v...>, const uint8_t* q, W* w) {
    const W planes = load_w(q + kNibbles);
    ((w[v] = fives_vector<plus, v>(q, planes)), ...);
}
template <int plus, int v>
INLINE W sixes_vector(const uint8_t* q, W planes) {
    const W w = with_planes<(v > 3), 4 - 2 * (v % 4), 0x30>(load_w(q + 64 * (v % 4)), planes);
    return plus == 0 ? w : add_w(w, plus);
}
template <int plus, int... v>
INLINE void unpack_sixes(Pack<v...>, const uint8_t* q, W* w) {
    const W planes[] = {load_w(q + kNibbles), load_w(q + kNibbles + 64)};
    ((w[v] = sixes_vector<plus, v>(q, planes[v / 4])), ...);
}
// The codebook, 128 too high.
struct Code {
    uint8_t plus_128[16];
    constexpr Code() : plus_128() {
        for (int i = 0; i < 16; ++i) plus_128[i] = static_cast<uint8_t>(kCode[i] + 128);
    }
};
constexpr Code kCodes;
INLINE void unpack_codes(const uint8_t* q, W* w) {
    for (int i = 0; i < 4; ++i) {
        const W v = load_w(q + 64 * i);
        w[i] = look_up(low_nibbles(v), kCodes.plus_128);
        w[i + 4] = look_up(high_nibbles(v), kCodes.plus_128);
    }
}

struct Scales {
    F scale, second;  // second: the upper 16 inputs' scale (split) or the minimum
};

// A float16 scale a group, and a float16 minimum where the format has one.
template <Format format>
INLINE Scales half_scales(const uint8_t* s, int g) {
    constexpr Layout at = layout_of(format);
    if constexpr (at.second < 0)
        return {load_f16(halves_at(s + at.scale_of(g))), zero()};
    else
        return {load_f16(halves_at(s + at.scale_of(g))), load_f16(halves_at(s + at.second_of(g)))};
}
// K-quants: the scale of a group is a small integer times the superblock's float16, the product exact in float32.
template <Format format>
INLINE Scales k_scales(const uint8_t* s, int g) {
    constexpr Layout at = layout_of(format);
    const F d = load_f16(halves_at(s + at.d));
    if constexpr (at.second < 0) {
        return {mul(d, load_i8(s + at.scale_of(g))), zero()};
    } else if constexpr (at.dmin < 0) {
        return {mul(d, load_i8(s + at.scale_of(g))), mul(d, load_i8(s + at.second_of(g)))};
    } else {
        const F dmin = load_f16(halves_at(s + at.dmin));
        return {mul(d, load_u8(s + at.scale_of(g))), sub(zero(), mul(dmin, load_u8(s + at.second_of(g))))};
    }
}

template <Format format>
INLINE Scales scales_of(const uint8_t* s, int g) {
    if constexpr (layout_of(format).d < 0)
        return half_scales<format>(s, g);
    else
        return k_scales<format>(s, g);
}

template <Format format>
struct Signed {
    static constexpr bool offset = true, split = false, minimum = false, small = false;
    INLINE Scales scales(const uint8_t* s, int g) { return scales_of<format>(s, g); }
};
template <Format format>
struct Unsigned {
    static constexpr bool offset = false, split = false, minimum = true, small = true;
    INLINE Scales scales(const uint8_t* s, int g) { return scales_of<format>(s, g); }
};

template <>
struct Unpack<Format::I4S> : Signed<Format::I4S> {
    static constexpr bool small = kMaddubs;
    INLINE void values(const uint8_t* q, W* w) { unpack_nibbles<!kMaddubs>(q, w); }
    INLINE Scales scales(const uint8_t* s, int g) { return {mul(scales_of<Format::I4S>(s, g).scale, set1(0.0625f)), zero()}; }
};
template <>
struct Unpack<Format::I4M> : Unsigned<Format::I4M> {
    INLINE void values(const uint8_t* q, W* w) { unpack_nibbles<false>(q, w); }
};
template <>
struct Unpack<Format::I4C> : Signed<Format::I4C> {
    INLINE void values(const uint8_t* q, W* w) { unpack_codes(q, w); }
};
template <>
struct Unpack<Format::I5S> : Signed<Format::I5S> {
    static constexpr bool small = true;
    INLINE void values(const uint8_t* q, W* w) { unpack_fives<128 - 16>(Range<8>{}, q, w); }
};
template <>
struct Unpack<Format::I5M> : Unsigned<Format::I5M> {
    INLINE void values(const uint8_t* q, W* w) { unpack_fives<0>(Range<8>{}, q, w); }
};
template <>
struct Unpack<Format::I8S> : Signed<Format::I8S> {
    INLINE void values(const uint8_t* q, W* w) { unpack_bytes(q, w); }
};
template <>
struct Unpack<Format::K4> : Unsigned<Format::K4> {
    INLINE void values(const uint8_t* q, W* w) { unpack_nibbles<false>(q, w); }
};
template <>
struct Unpack<Format::K4C> : Signed<Format::K4C> {
    INLINE void values(const uint8_t* q, W* w) { unpack_codes(q, w); }
};
template <>
struct Unpack<Format::K5> : Unsigned<Format::K5> {
    INLINE void values(const uint8_t* q, W* w) { unpack_fives<0>(Range<8>{}, q, w); }
};
template <>
struct Unpack<Format::K6> : Signed<Format::K6> {
    static constexpr bool split = true, small = true;
    INLINE void values(const uint8_t* q, W* w) { unpack_sixes<128 - 32>(Range<8>{}, q, w); }
};

// The integer sums of one token and one group: x over the first 16 inputs, z over the second, offsets taken off. Exact,
// so that how they are formed is each path's own affair.
struct Dots {
    I x, z;
};
template <Format format>
INLINE Dots dots(const W* q, const uint8_t* r) {
    using L = Unpack<format>;
    I x = L::offset ? set1_pair(r + 44) : zero_i();
    I z = L::offset ? set1_pair(r + 48) : zero_i();
#ifdef OUTPACE_MADDUBS
    constexpr bool sixteenths = format == Format::I4S;  // its nibbles stay small here; their sum takes the 16
    constexpr bool negative = L::offset && !sixteenths;
    const I low = dot16<L::small, negative>(q, r), high = dot16<L::small, negative>(q + 4, r + 16);
    if constexpr (sixteenths) return {add_i(x, times_16(low)), add_i(z, times_16(high))};
    return {low, high};
#else
    x = dot4(x, q[0], r);
    z = dot4(z, q[4], r + 16);
    x = dot4(x, q[1], r + 4);
    z = dot4(z, q[5], r + 20);
    x = dot4(x, q[2], r + 8);
    z = dot4(z, q[6], r + 24);
    x = dot4(x, q[3], r + 12);
    z = dot4(z, q[7], r + 28);
    return {x, z};
#endif
}

// A group's share of a token's sum: the one sequence of float operations behind every integer product.
template <class L>
INLINE F scaled(F acc, Dots d, const Scales& k, const uint8_t* r) {
    const F low = mul(to_float(d.x), set1(float_at(r + 32))), high = set1(float_at(r + 36));
    if constexpr (L::split)
        acc = fma(k.second, mul(to_float(d.z), high), fma(k.scale, low, acc));
    else
        acc = fma(k.scale, fma(to_float(d.z), high, low), acc);
    if constexpr (L::minimum) acc = fma(k.second, set1(float_at(r + 40)), acc);
    return acc;
}

// Tokens kTogether by kTogether: chains of one token's operations are long, and a processor looks only so far ahead.
template <Format format, int first, int tokens, int... t>
INLINE void step(Pack<t...>, F (&acc)[tokens], const W* q, const Scales& k, const uint8_t* r) {
    constexpr int record = act_bytes(Acts::I8);
    const Dots d[] = {dots<format>(q, r + record * t)...};
    ((acc[first + t] = scaled<Unpack<format>>(acc[first + t], d[t], k, r + record * t)), ...);
    constexpr int next = first + static_cast<int>(sizeof...(t)), left = tokens - next;
    if constexpr (left > 0) step<format, next>(Range<(left < kTogether ? left : kTogether)>{}, acc, q, k, r + record * (next - first));
}

// `t` are the tokens of the tile: spelled out as a pack, so that the accumulators are registers and never an array.
template <Format format, int... t>
static void tile(Pack<t...>, const uint8_t* w, int superblocks, const uint8_t* a, int64_t stride, float* y, int64_t ldy) {
    using L = Unpack<format>;
    constexpr Layout at = layout_of(format);
    constexpr int tokens = static_cast<int>(sizeof...(t));
    F acc[] = {(static_cast<void>(t), zero())...};
    for (int s = 0; s < superblocks; ++s, w += at.bytes) {
        prefetch(w, at.bytes);
        for (int g = 0; g < at.groups; ++g, a += stride) {
            W q[8];
            L::values(w + at.values_of(g), q);
            const Scales k = L::scales(w, g);
            step<format, 0>(Range<(tokens < kTogether ? tokens : kTogether)>{}, acc, q, k, a);
        }
    }
    (store(y + t * ldy, acc[t]), ...);
}

// bf16 pairs, f16 and f32 share a shape: one product a step, inputs in order.
template <Format format, int... t>
static void float_tile(Pack<t...>, const uint8_t* w, int superblocks, const uint8_t* a, int64_t stride, float* y, int64_t ldy) {
    constexpr Layout at = layout_of(format);
    constexpr int steps = format == Format::B16 ? 16 : 32;  // a group
    constexpr int step_bytes = format == Format::H16 ? 32 : 64;
    constexpr int record = act_bytes(at.acts);
    F acc[] = {(static_cast<void>(t), zero())...};
    for (int s = 0; s < superblocks; ++s) {
        for (int g = 0; g < at.groups; ++g, a += stride) {
            for (int i = 0; i < steps; ++i, w += step_bytes) {
                if (i % (64 / step_bytes) == 0) __builtin_prefetch(w + kAhead, 0, 3);
                if constexpr (format == Format::B16) {
                    const I pairs = load_pairs(w);
                    ((acc[t] = dot_pairs(pairs, set1_pair(a + t * record + 4 * i), acc[t])), ...);
                } else {
                    const F v = format == Format::H16 ? load_f16(halves_at(w)) : load(reinterpret_cast<const float*>(w));
                    ((acc[t] = fma(v, set1(float_at(a + t * record + 4 * i)), acc[t])), ...);
                }
            }
        }
    }
    (store(y + t * ldy, acc[t]), ...);
}

// See Kernels::dot_pairs.
static void dot_pairs_of(const uint32_t* a, const uint32_t* b, const float* c, float* out) {
    store(out, dot_pairs(load_i(a), load_i(b), load(c)));
}

template <Format format, class P>
INLINE void any_tile(P pack, const uint8_t* w, int superblocks, const uint8_t* a, int64_t stride, float* y, int64_t ldy) {
    if constexpr (layout_of(format).acts == Acts::I8)
        tile<format>(pack, w, superblocks, a, stride, y, ldy);
    else
        float_tile<format>(pack, w, superblocks, a, stride, y, ldy);
}

template <Format format>
static void product(const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
    constexpr Layout at = layout_of(format);
    const int superblocks = m.groups / at.groups;
    const int record = act_bytes(at.acts);
    const int64_t stride = static_cast<int64_t>(n) * record;
    for (int b = begin; b < end; ++b) {
        const uint8_t* w = m.data + static_cast<size_t>(b) * m.block_bytes;
        float* out = y + b * kRows;
        int t = 0;
#define OUTPACE_TILES(T)      \
    if constexpr (kTile >= T) \
        for (; n - t >= T; t += T) any_tile<format>(Range<T>{}, w, superblocks, acts + t * record, stride, out + t * ldy, ldy);
        OUTPACE_TILES(16)
        OUTPACE_TILES(12)
        OUTPACE_TILES(8)
        OUTPACE_TILES(7)
        OUTPACE_TILES(6)
        OUTPACE_TILES(5)
        OUTPACE_TILES(4)
        OUTPACE_TILES(3)
        OUTPACE_TILES(2)
        OUTPACE_TILES(1)
#undef OUTPACE_TILES
    }
}

// Calls body(constant) with the format as a constant.
template <class Body>
INLINE void with_format(Format format, const Body& body) {
    switch (format) {
        case Format::I4S: return body(std::integral_constant<Format, Format::I4S>{});
        case Format::I4M: return body(std::integral_constant<Format, Format::I4M>{});
        case Format::I4C: return body(std::integral_constant<Format, Format::I4C>{});
        case Format::I5S: return body(std::integral_constant<Format, Format::I5S>{});
        case Format::I5M: return body(std::integral_constant<Format, Format::I5M>{});
        case Format::I8S: return body(std::integral_constant<Format, Format::I8S>{});
        case Format::K4: return body(std::integral_constant<Format, Format::K4>{});
        case Format::K4C: return body(std::integral_constant<Format, Format::K4C>{});
        case Format::K5: return body(std::integral_constant<Format, Format::K5>{});
        case Format::K6: return body(std::integral_constant<Format, Format::K6>{});
        case Format::B16: return body(std::integral_constant<Format, Format::B16>{});
        case Format::H16: return body(std::integral_constant<Format, Format::H16>{});
        case Format::F32: return body(std::integral_constant<Format, Format::F32>{});
    }
}

static void matmul(const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
    with_format(m.format, [&](auto format) { product<format.value>(m, acts, n, begin, end, y, ldy); });
}

}  // namespace OUTPACE_NS
}  // namespace outpace
