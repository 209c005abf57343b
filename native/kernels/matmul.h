// Matrix products: 16 output rows by up to kTile tokens in registers. A row block's weights are unpacked once for all
// tokens of a tile, and its float sums are formed group after group along the inputs, for every token alike: neither
// the width, the tile nor the thread can show in a result.
#pragma once

#include <type_traits>

#include "kernels/simd.h"
#include "kernels/table.h"

namespace outpace {
namespace OUTPACE_NS {

// Bytes to prefetch ahead, since a row block is read strictly forward. Integer formats ask twice, group by group: far ahead into
// the second cache, whose misses overlap more than the first one's, then from there into the first.
constexpr int kAhead = 4096, kFar = 8192, kNear = 1280;

INLINE void prefetch(const uint8_t* p, int first_line, int end_line) {
    for (int line = first_line; line < end_line; ++line) {
        __builtin_prefetch(p + kFar + 64 * line, 0, 2);
        __builtin_prefetch(p + kNear + 64 * line, 0, 3);
    }
}

INLINE const uint16_t* halves_at(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

#ifdef OUTPACE_MADDUBS
constexpr bool kMaddubs = true;
#else
constexpr bool kMaddubs = false;
#endif
#ifdef OUTPACE_SIGNED
constexpr bool kSigned = true;
#else
constexpr bool kSigned = false;
#endif

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
// Nibbles under a plane of fifth bits, or two of upper pairs of bits; `plus` is added to each byte.
template <int plus, int left, int mask, int v>
INLINE W upper_vector(const uint8_t* q, W planes) {
    const W w = with_planes<(v > 3), left, mask>(load_w(q + 64 * (v % 4)), planes);
    return plus == 0 ? w : add_w(w, plus);
}
template <int plus, int... v>
INLINE void unpack_fives(Pack<v...>, const uint8_t* q, W* w) {
    const W planes = load_w(q + kNibbles);
    ((w[v] = upper_vector<plus, 4 - v, 0x10, v>(q, planes)), ...);
}
template <int plus, int... v>
INLINE void unpack_sixes(Pack<v...>, const uint8_t* q, W* w) {
    const W planes[] = {load_w(q + kNibbles), load_w(q + kNibbles + 64)};
    ((w[v] = upper_vector<plus, 4 - 2 * (v % 4), 0x30, v>(q, planes[v / 4])), ...);
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

// Either float16 scales (and minima) of groups, or small integers times the superblock's float16, exact in float32.
template <Format format>
INLINE Scales scales_of(const uint8_t* s, int g) {
    constexpr Layout at = layout_of(format);
    const auto half = [s](int offset) { return load_f16(halves_at(s + offset)); };
    if constexpr (at.d < 0)
        return {half(at.scale_of(g)), at.second < 0 ? zero() : half(at.second_of(g))};
    else if constexpr (at.dmin >= 0)
        return {mul(half(at.d), load_u8(s + at.scale_of(g))), sub(zero(), mul(half(at.dmin), load_u8(s + at.second_of(g))))};
    else
        return {mul(half(at.d), load_i8(s + at.scale_of(g))), at.second < 0 ? zero() : mul(half(at.d), load_i8(s + at.second_of(g)))};
}

// What differs between the integer formats: how their numbers unpack; where they stand is layout.h's.
template <Format format>
struct Unpack {
    static constexpr Layout at = layout_of(format);
    static constexpr bool code = format == Format::I4C || format == Format::K4C, split = format == Format::K6;  // a scale each 16 inputs
    static constexpr bool minimum = !split && at.second >= 0;                      // d q + m
    static constexpr bool offset = !minimum;                                       // bytes are 128 too high
    static constexpr bool sixteenths = format == Format::I4S && !kMaddubs;         // nibbles become 16 times what they are
    static constexpr bool small = !code && !sixteenths && at.group_bytes < kBytes;  // no value is beyond 32
    static constexpr bool shifts = offset && !kSigned;                             // sums start at what takes the 128 off
    INLINE void values(const uint8_t* q, W* w) {
        if constexpr (code)
            unpack_codes(q, w);
        else if constexpr (at.group_bytes == kNibbles)
            unpack_nibbles<sixteenths>(q, w);
        else if constexpr (at.group_bytes == kFives)
            unpack_fives<minimum ? 0 : 128 - 16>(Range<8>{}, q, w);
        else if constexpr (at.group_bytes == kSixes)
            unpack_sixes<128 - 32>(Range<8>{}, q, w);
        else
            unpack_bytes(q, w);
        for (int i = 0; offset && kSigned && i < 8; ++i) w[i] = add_w(w[i], 128);  // signed bytes, 128 too high no more
    }
    INLINE Scales scales(const uint8_t* s, int g) {
        Scales found = scales_of<format>(s, g);
        if constexpr (format == Format::I4S) found.scale = mul(found.scale, set1(0.0625f));
        return found;
    }
};

// The integer sums of one token and one group: x over the first 16 inputs, z over the second, offsets taken off. Exact,
// so that how they are formed is each path's own affair.
struct Dots {
    I x, z;
};
template <Format format>
INLINE Dots dots(const W* q, const uint8_t* r) {
    using L = Unpack<format>;
    I x = L::shifts ? set1_pair(r + 44) : zero_i();
    I z = L::shifts ? set1_pair(r + 48) : zero_i();
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
    constexpr int tokens = static_cast<int>(sizeof...(t)), lines = at.bytes / 64;
    F acc[] = {(static_cast<void>(t), zero())...};
    for (int s = 0; s < superblocks; ++s, w += at.bytes) {
        for (int g = 0; g < at.groups; ++g, a += stride) {
            prefetch(w, lines * g / at.groups, lines * (g + 1) / at.groups);
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

// Tokens in tiles of the widths that are given, as many of each as there are.
template <Format format, int... widths>
INLINE void in_tiles_of(Pack<widths...>, const uint8_t* w, int superblocks, const uint8_t* acts, int n, float* y, int64_t ldy) {
    const int record = act_bytes(layout_of(format).acts);
    int t = 0;
    const auto tiles = [&](auto pack, int width) {
        for (; n - t >= width; t += width) any_tile<format>(pack, w, superblocks, acts + t * record, int64_t{n} * record, y + t * ldy, ldy);
    };
    (tiles(Range<(widths <= kTile ? widths : 1)>{}, widths <= kTile ? widths : n + 1), ...);
}

template <Format format>
static void product(const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
    for (int b = begin; b < end; ++b)
        in_tiles_of<format>(Pack<16, 12, 8, 7, 6, 5, 4, 3, 2, 1>{}, m.data + static_cast<size_t>(b) * m.block_bytes,
            m.groups / layout_of(format).groups, acts, n, y + b * kRows, ldy);
}

// Calls body(constant) with the format as a constant.
template <class Body, int... f>
INLINE void with_format(Pack<f...>, Format format, const Body& body) {
    static_cast<void>(
        ((format == static_cast<Format>(f) && (body(std::integral_constant<Format, static_cast<Format>(f)>{}), true)) || ...));
}
using Formats = Range<static_cast<int>(Format::F32) + 1>;

static void matmul(const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
    with_format(Formats{}, m.format, [&](auto format) { product<format.value>(m, acts, n, begin, end, y, ldy); });
}

}  // namespace OUTPACE_NS
}  // namespace outpace
