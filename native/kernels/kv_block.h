// One block of 64 positions of a KV head: how its keys and values lie, and the sums over them.
//
// Keys: bf16 [4 x 16 slots][dim / 2][16][2], f32 or int8 [4 x 16 slots][dim][16]. Values: [64 slots][dim]. After int8
// numbers, keys or values, stand 64 float scales, one a slot: a key's scale multiplies its score, a value's its weight.
// Whether numbers become floats on the way or once for all queries of a job cannot show: both are exact.
#pragma once

#include <type_traits>

#include "kernels/math.h"
#include "kernels/table.h"
#include "weights/halves.h"

namespace outpace {
namespace OUTPACE_NS {

constexpr int kSub = 16;  // slots of a key tile

template <KVType type>
INLINE int key_tile_bytes(int dim) {
    return dim * kSub * element_bytes(type);
}

// The scales of a block's keys, or values; null where the type has none.
template <KVType type>
INLINE const float* scales_of(const uint8_t* part, int dim) {
    return type == KVType::I8 ? reinterpret_cast<const float*>(part + kBlock * dim) : nullptr;
}

// Whether scores are computed in pairs by an instruction, from the queries' bfloat16 bits. Beside bfloat16 keys queries are
// rounded to bfloat16 on every path; others keep them as floats, and have the same bits by two multiply-adds.
template <KVType type>
constexpr bool kPairs = type == KVType::BF16 && kDotPairs;

template <KVType type>
using Query = std::conditional_t<kPairs<type>, uint16_t, float>;

// Lines that will be needed after this block, asked for while it is computed, so many at a time: a row's cache is read once
// a layer and has left every near cache since.
struct Fetch {
    const uint8_t *at = nullptr, *end = nullptr;

    template <int lines>
    void step() {
        if (at >= end) return;
        for (int line = 0; line < lines; ++line) __builtin_prefetch(at + 64 * line, 0, 3);
        at += 64 * lines;
    }
};

// How many lines a step asks for: a job whose queries are one tile passes over a block once, others several times.
template <KVType type, bool wide>
constexpr int kKeyLines = wide ? 2 : 2 * element_bytes(type);  // two dimensions of a block's keys
template <KVType type, bool wide>
constexpr int kValueLines = wide ? 1 : element_bytes(type);  // 64 dimensions of a value

// Two dimensions of 16 keys; `k` at an even dimension.
template <KVType type>
struct KeyPair {
    F first, second;
    I both;
    INLINE KeyPair at(const uint8_t* k) {
        if constexpr (type == KVType::F32) {
            const float* p = reinterpret_cast<const float*>(k);
            return {load(p), load(p + kSub), zero_i()};
        } else if constexpr (type == KVType::I8) {
            return {load_i8(k), load_i8(k + kSub), zero_i()};
        } else if constexpr (kDotPairs) {
            return {zero(), zero(), load_pairs(k)};
        } else {
            const I pairs = load_pairs(k);
            return {pair_low(pairs), pair_high(pairs), pairs};
        }
    }
};

// The second dimension first: the order of the instruction for pairs.
template <KVType type>
INLINE F score_step(F acc, const KeyPair<type>& k, const Query<type>* q) {
    if constexpr (kPairs<type>)
        return dot_pairs(k.both, set1_pair(q), acc);
    else
        return fma(k.first, set1(q[0]), fma(k.second, set1(q[1]), acc));
}

// scores[q][16 tile + lane] of a whole block for the queries of the pack.
template <KVType type, bool wide, int... i>
static void score_block(
    Pack<i...>, const Query<type>* const* q, const uint8_t* keys, const float* scales, int dim, Fetch& fetching, float (*scores)[kBlock]) {
    Fetch fetch = fetching;
    F a[] = {(static_cast<void>(i), zero())...}, b[] = {(static_cast<void>(i), zero())...};
    F c[] = {(static_cast<void>(i), zero())...}, d[] = {(static_cast<void>(i), zero())...};
    const int tile = key_tile_bytes<type>(dim), step = 2 * kSub * element_bytes(type);
    for (int at = 0; at < dim; at += 2, keys += step) {
        fetch.step<kKeyLines<type, wide>>();
        const KeyPair<type> ka = KeyPair<type>::at(keys), kb = KeyPair<type>::at(keys + tile);
        const KeyPair<type> kc = KeyPair<type>::at(keys + 2 * tile), kd = KeyPair<type>::at(keys + 3 * tile);
        ((a[i] = score_step<type>(a[i], ka, q[i] + at)), ...);
        ((b[i] = score_step<type>(b[i], kb, q[i] + at)), ...);
        ((c[i] = score_step<type>(c[i], kc, q[i] + at)), ...);
        ((d[i] = score_step<type>(d[i], kd, q[i] + at)), ...);
    }
    fetching = fetch;
    const auto put = [&](F* sums, int place) {
        if (scales) {
            const F scale = load(scales + place);
            ((sums[i] = mul(sums[i], scale)), ...);
        }
        (store(scores[i] + place, sums[i]), ...);
    };
    put(a, 0);
    put(b, 16);
    put(c, 32);
    put(d, 48);
}

// One query against one slot, by the same operations as its lane above.
template <KVType type>
static float score_slot(const Query<type>* q, const uint8_t* keys, int slot, int dim) {
    const uint8_t* k = keys + slot / kSub * key_tile_bytes<type>(dim);
    F acc = zero();
    for (int at = 0; at < dim; at += 2, k += 2 * kSub * element_bytes(type)) acc = score_step<type>(acc, KeyPair<type>::at(k), q + at);
    const float* scales = scales_of<type>(keys, dim);
    if (scales) acc = mul(acc, load(scales + slot / kSub * kSub));
    float lanes[kSub];
    store(lanes, acc);
    return lanes[slot % kSub];
}

template <KVType type>
INLINE F load_value(const uint8_t* v, int d) {
    if constexpr (type == KVType::F32)
        return load(reinterpret_cast<const float*>(v) + d);
    else if constexpr (type == KVType::I8)
        return load_i8(v + d);
    else
        return load_bf16(reinterpret_cast<const uint16_t*>(v) + d);
}

// out[q][d ..] += weights[q][p] * value[p] for p in [from, to), position after position; C vectors of 16 dimensions.
template <KVType type, bool wide, int... i, int... c>
INLINE void add_values(Pack<i...>, Pack<c...>, const float (*weights)[kBlock], const uint8_t* values, int row, int from, int to, int d,
    Fetch& fetching, float* const* out) {
    Fetch fetch = fetching;
    struct Sums {
        F of[sizeof...(c)];
    };
    const auto get = [&](const float* o) { return Sums{{load(o + d + 16 * c)...}}; };
    Sums acc[] = {get(out[i])...};
    const auto position = [&](int p) __attribute__((always_inline)) {
        const uint8_t* at = values + p * row;
        const F v[] = {load_value<type>(at, d + 16 * c)...};
        const auto add = [&](Sums& s, const float* w) {
            const F weight = set1(w[p]);
            ((s.of[c] = fma(weight, v[c], s.of[c])), ...);
        };
        (add(acc[i], weights[i]), ...);
    };
    int p = from;
    for (; p + 1 < to; p += 2) {
        fetch.step<2 * kValueLines<type, wide>>();
        position(p);
        position(p + 1);
    }
    if (p < to) position(p);
    fetching = fetch;
    const auto put = [&](const Sums& s, float* o) { (store(o + d + 16 * c, s.of[c]), ...); };
    (put(acc[i], out[i]), ...);
}

template <KVType type, bool wide, class P>
static void add_range(
    P pack, const float (*weights)[kBlock], const uint8_t* values, int dim, int from, int to, Fetch& fetch, float* const* out) {
    const int row = dim * element_bytes(type);
    int d = 0;
    for (; d + 64 <= dim; d += 64) add_values<type, wide>(pack, Range<4>{}, weights, values, row, from, to, d, fetch, out);
    for (; d < dim; d += 16) add_values<type, wide>(pack, Range<1>{}, weights, values, row, from, to, d, fetch, out);
}

// A block's keys, or values, as floats in the layout that floats have.
template <KVType type>
static void widen_keys(const uint8_t* keys, int dim, float* out) {
    for (int at = 0; at < kBlock * dim; at += 2 * kSub) {
        const KeyPair<type> pair = KeyPair<type>::at(keys + at * element_bytes(type));
        store(out + at, pair.first);
        store(out + at + kSub, pair.second);
    }
}
template <KVType type>
static void widen_values(const uint8_t* values, int dim, int from, int to, float* out) {
    for (int at = from * dim; at < to * dim; at += 16) store(out + at, load_value<type>(values, at));
}

// Calls body(pack, first query) for runs of up to kQueries queries.
template <class Body, int... widths>
INLINE void in_tiles(Pack<widths...>, int queries, const Body& body) {
    int i = 0;
    const auto run = [&](auto pack, int width) {
        for (; queries - i >= width; i += width) body(pack, i);
    };
    (run(Range<(widths <= kQueries ? widths : 1)>{}, widths <= kQueries ? widths : queries + 1), ...);
}

}  // namespace OUTPACE_NS
}  // namespace outpace
