// One block of 64 positions of a KV head: how its keys and values lie, and the sums over them.
//
// Keys: bf16 [4 x 16 slots][dim / 2][16][2], f32 or f16 [4 x 16 slots][dim][16]. Values: [64 slots][dim]. int8 and int4:
// kv_integers.h.
// A tile is up to kQueries queries by up to kVectors vectors of 16 keys, or of 16 dimensions of a value: its sums stay in
// registers, and what it reads becomes floats on the way.
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

// Whether scores are computed in pairs by an instruction, from the queries' bfloat16 bits. Beside bfloat16 keys queries are
// rounded to bfloat16 on every path; others keep them as floats, and have the same bits by two multiply-adds.
template <KVType type>
constexpr bool kPairs = type == KVType::BF16 && kDotPairs;

template <KVType type>
using Query = std::conditional_t<kPairs<type>, uint16_t, float>;

// Lines that will be needed after this block, asked for while it is computed, so many a step: evenly, since a burst fills the
// buffers for misses. They go to the second cache: a row's cache is read once a layer and has left every near cache since.
struct Fetch {
    const uint8_t *at = nullptr, *end = nullptr;
    int lines = 0;

    void step() {
        if (at >= end) return;
        for (int i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

template <int count>
struct Vectors {
    F of[count];
};
template <int... c>
INLINE Vectors<sizeof...(c)> zeros(Pack<c...>) {
    return {{(static_cast<void>(c), zero())...}};
}

// Dimension d, or `odd` d + 1, of 16 keys; `k` at an even d.
template <KVType type, bool odd>
INLINE F load_key(const uint8_t* k) {
    if constexpr (type == KVType::F32)
        return load(reinterpret_cast<const float*>(k) + (odd ? kSub : 0));
    else if constexpr (type == KVType::F16)
        return load_f16(reinterpret_cast<const uint16_t*>(k) + (odd ? kSub : 0));
    else
        return odd ? pair_high(load_pairs(k)) : pair_low(load_pairs(k));
}

// scores [q][kBlock], at [16 k + lane], of key tiles k for the queries of the pack: for each a chain over the dimensions, of two the odd one
// first, which is the order of the instruction for pairs.
template <KVType type, int... i, int... k>
static void score_tile(
    Pack<i...>, Pack<k...> tiles, const Query<type> (*q)[kMaxHead], const uint8_t* keys, int dim, Fetch& fetching, float* scores) {
    Fetch fetch = fetching;
    Vectors<sizeof...(k)> acc[] = {(static_cast<void>(i), zeros(tiles))...};
    const int tile = key_tile_bytes<type>(dim);
    for (int at = 0; at < dim; at += 2, keys += 2 * kSub * element_bytes(type)) {
        fetch.step();
        if constexpr (kPairs<type>) {
            const I key[] = {load_pairs(keys + k * tile)...};
            const auto add = [&](auto& sums, const Query<type>* x) __attribute__((always_inline)) {
                const I by = set1_pair(x);
                ((sums.of[k] = dot_pairs(key[k], by, sums.of[k])), ...);
            };
            (add(acc[i], q[i] + at), ...);
        } else {
            const auto half = [&](auto odd) __attribute__((always_inline)) {
                const F key[] = {load_key<type, odd.value>(keys + k * tile)...};
                const auto add = [&](auto& sums, float x) __attribute__((always_inline)) {
                    const F by = set1(x);
                    ((sums.of[k] = fma(key[k], by, sums.of[k])), ...);
                };
                (add(acc[i], q[i][at + odd.value]), ...);
            };
            half(std::true_type{});
            half(std::false_type{});
        }
    }
    fetching = fetch;
    const auto put = [&](const auto& sums, float* to) { (store(to + kSub * k, sums.of[k]), ...); };
    (put(acc[i], scores + i * kBlock), ...);
}

// Dimensions of a value that stand in tiles of kVectors vectors; the rest are taken 16 at a time.
constexpr int kTileDims = 16 * kVectors;
// How many of them, bfloat16, stand with the even ones of 32 first, then the odd ones: so a load of 32 gives them.
template <KVType type>
INLINE int split_dims(int dim) {
    return type == KVType::BF16 ? dim / kTileDims * kTileDims : 0;
}

template <KVType type, int... c>
INLINE Vectors<sizeof...(c)> load_value(Pack<c...>, const uint8_t* v) {
    if constexpr (type == KVType::F32) {
        return {{load(reinterpret_cast<const float*>(v) + 16 * c)...}};
    } else if constexpr (type == KVType::F16) {
        return {{load_f16(reinterpret_cast<const uint16_t*>(v) + 16 * c)...}};
    } else if constexpr (sizeof...(c) == 1) {
        return {{load_bf16(reinterpret_cast<const uint16_t*>(v))}};
    } else {
        const auto part = [&](int at) __attribute__((always_inline)) {
            const I pairs = load_pairs(v + at / 2 * 64);
            return at % 2 ? pair_high(pairs) : pair_low(pairs);
        };
        return {{part(c)...}};
    }
}

// Calls body(0, 1, ... n - 1 as a type) for n from 1 to `most`.
template <int most, class Body>
INLINE void with_range(int n, const Body& body) {
    if constexpr (most > 1)
        if (n < most) return with_range<most - 1>(n, body);
    body(Range<most>{});
}

// Calls body(pack, first query) for tiles of nearly equal size, of `most` queries.
template <int most, class Body>
INLINE void in_tiles(int queries, const Body& body) {
    for (int i = 0, n, tiles = (queries + most - 1) / most; i < queries; i += n, --tiles) {
        n = (queries - i + tiles - 1) / tiles;
        with_range<most>(n, [&](auto pack) { body(pack, i); });
    }
}

}  // namespace OUTPACE_NS
}  // namespace outpace
