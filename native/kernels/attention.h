// Attention of a few query vectors over one KV head of one row, in blocks of 64 positions.
//
// For each query alone: a block's scores stand in the order of positions, whatever slots they came from; the block's
// peak, weights, their sum and the weighted values are formed in a fixed shape, values position after position, and
// depend on that block only; blocks are then merged in order. So a result depends on the query, its position and what
// stands at the positions it sees: not on the other queries of the job, nor on who computed which block. Positions that
// a query does not see are skipped: their values are never read.
//
// Keys of a block: bf16 [4 x 16 slots][dim / 2][16][2], or f32 [4 x 16 slots][dim][16]. Values: [64 slots][dim].
#pragma once

#include <cmath>

#include "weights/halves.h"
#include "kernels/math.h"
#include "kernels/range.h"
#include "kernels/table.h"

namespace outpace {
namespace OUTPACE_NS {

constexpr int kSub = 16;  // slots of a key tile

template <bool f32>
INLINE int key_tile_bytes(int dim) {
    return dim * kSub * (f32 ? 4 : 2);
}

// Whether scores are sums of bfloat16 products: where there is an instruction for it, queries are rounded as keys are.
template <bool f32>
constexpr bool kPairs = !f32 && kDotPairs;

template <bool pairs>
struct QueryOf {
    using type = float;
};
template <>
struct QueryOf<true> {
    using type = uint16_t;
};
template <bool f32>
using Query = typename QueryOf<kPairs<f32>>::type;

// Two dimensions of 16 keys; `k` at an even dimension.
template <bool f32>
struct KeyPair {
    F first, second;
    I both;
    INLINE KeyPair at(const uint8_t* k) {
        if constexpr (f32) {
            const float* p = reinterpret_cast<const float*>(k);
            return {load(p), load(p + kSub), zero_i()};
        } else if constexpr (kDotPairs) {
            return {zero(), zero(), load_pairs(k)};
        } else {
            const I pairs = load_pairs(k);
            return {pair_low(pairs), pair_high(pairs), pairs};
        }
    }
};

template <bool f32>
INLINE F score_step(F acc, const KeyPair<f32>& k, const Query<f32>* q) {
    if constexpr (kPairs<f32>)
        return dot_pairs(k.both, set1_pair(q), acc);
    else
        return fma(k.second, set1(q[1]), fma(k.first, set1(q[0]), acc));
}

// scores[q][16 tile + lane] of a whole block for the queries of the pack; meanwhile the block's values, and the keys
// that are needed after it, are fetched: a row's cache is read once a layer and has left every near cache since.
template <bool f32, int... i>
static void score_block(Pack<i...>, const Query<f32>* const* q, const uint8_t* keys, const uint8_t* values,
                        const uint8_t* upcoming, int dim, float (*scores)[kBlock]) {
    F a[] = {(static_cast<void>(i), zero())...}, b[] = {(static_cast<void>(i), zero())...};
    F c[] = {(static_cast<void>(i), zero())...}, d[] = {(static_cast<void>(i), zero())...};
    const int tile = key_tile_bytes<f32>(dim), step = 2 * kSub * (f32 ? 4 : 2);
    for (int at = 0; at < dim; at += 2, keys += step, values += 4 * step, upcoming += 4 * step) {
        for (int line = 0; line < 4 * step; line += 64) {
            __builtin_prefetch(values + line, 0, 3);
            __builtin_prefetch(upcoming + line, 0, 2);
        }
        const KeyPair<f32> ka = KeyPair<f32>::at(keys), kb = KeyPair<f32>::at(keys + tile);
        const KeyPair<f32> kc = KeyPair<f32>::at(keys + 2 * tile), kd = KeyPair<f32>::at(keys + 3 * tile);
        ((a[i] = score_step<f32>(a[i], ka, q[i] + at)), ...);
        ((b[i] = score_step<f32>(b[i], kb, q[i] + at)), ...);
        ((c[i] = score_step<f32>(c[i], kc, q[i] + at)), ...);
        ((d[i] = score_step<f32>(d[i], kd, q[i] + at)), ...);
    }
    (store(scores[i], a[i]), ...);
    (store(scores[i] + 16, b[i]), ...);
    (store(scores[i] + 32, c[i]), ...);
    (store(scores[i] + 48, d[i]), ...);
}

// One query against one slot, by the same operations as its lane above.
template <bool f32>
static float score_slot(const Query<f32>* q, const uint8_t* keys, int slot, int dim) {
    const uint8_t* k = keys + slot / kSub * key_tile_bytes<f32>(dim);
    F acc = zero();
    for (int at = 0; at < dim; at += 2, k += 2 * kSub * (f32 ? 4 : 2)) acc = score_step<f32>(acc, KeyPair<f32>::at(k), q + at);
    float lanes[kSub];
    store(lanes, acc);
    return lanes[slot % kSub];
}

template <bool f32>
INLINE F load_value(const uint8_t* v, int d) {
    if constexpr (f32)
        return load(reinterpret_cast<const float*>(v) + d);
    else
        return load_bf16(reinterpret_cast<const uint16_t*>(v) + d);
}

// out[q][d ..] += weights[q][p] * value[p] for p in [from, to), position after position; C vectors of 16 dimensions.
template <bool f32, int... i, int... c>
INLINE void add_values(Pack<i...>, Pack<c...>, const float (*weights)[kBlock], const uint8_t* values, int row, int from, int to,
                       int d, float* const* out) {
    struct Sums {
        F of[sizeof...(c)];
    };
    const auto get = [&](const float* o) { return Sums{{load(o + d + 16 * c)...}}; };
    Sums acc[] = {get(out[i])...};
    for (int p = from; p < to; ++p) {
        const uint8_t* at = values + p * row;
        const F v[] = {load_value<f32>(at, d + 16 * c)...};
        const auto add = [&](Sums& s, const float* w) {
            const F weight = set1(w[p]);
            ((s.of[c] = fma(weight, v[c], s.of[c])), ...);
        };
        (add(acc[i], weights[i]), ...);
    }
    const auto put = [&](const Sums& s, float* o) { (store(o + d + 16 * c, s.of[c]), ...); };
    (put(acc[i], out[i]), ...);
}

template <bool f32, class P>
static void add_range(P pack, const float (*weights)[kBlock], const uint8_t* values, int dim, int from, int to,
                      float* const* out) {
    const int row = dim * (f32 ? 4 : 2);
    int d = 0;
    for (; d + 64 <= dim; d += 64) add_values<f32>(pack, Range<4>{}, weights, values, row, from, to, d, out);
    for (; d < dim; d += 16) add_values<f32>(pack, Range<1>{}, weights, values, row, from, to, d, out);
}

// The scores of positions [begin, end) of a block -> weights relative to the block's peak, their sum, and the peak.
INLINE void soften(float* scores, int begin, int end, float* block_peak, float* total) {
    for (int p = 0; p < begin; ++p) scores[p] = -INFINITY;
    for (int p = end; p < kBlock; ++p) scores[p] = -INFINITY;
    const F a = load(scores), b = load(scores + 16), c = load(scores + 32), d = load(scores + 48);
    *block_peak = peak(max(max(a, b), max(c, d)));
    const F shift = set1(*block_peak);
    const F ea = exp(sub(a, shift)), eb = exp(sub(b, shift)), ec = exp(sub(c, shift)), ed = exp(sub(d, shift));
    store(scores, ea);
    store(scores + 16, eb);
    store(scores + 32, ec);
    store(scores + 48, ed);
    *total = sum(add(add(ea, eb), add(ec, ed)));
}

// What has been merged so far, and one block more: out = out * old + block * fresh, with weights relative to the new peak.
struct Merged {
    float peak = -INFINITY, total = 0.0f;

    INLINE float weight(float difference) {
        float lanes[16];
        store(lanes, exp(set1(difference)));
        return lanes[0];
    }
    void add(float block_peak, float block_total, const float* block, float* out, int dim) {
        const float top = block_peak > peak ? block_peak : peak;
        const float old = peak == top ? 1.0f : weight(peak - top);
        const float fresh = block_peak == top ? 1.0f : weight(block_peak - top);
        peak = top;
        total = total * old + block_total * fresh;
        const F keep = set1(old), take = set1(fresh);
        for (int d = 0; d < dim; d += 16) store(out + d, fma(load(block + d), take, mul(load(out + d), keep)));
    }
    void finish(float* out, int dim) const {
        const F inverse = set1(1.0f / total);
        for (int d = 0; d < dim; d += 16) store(out + d, mul(load(out + d), inverse));
    }
};

// Calls body(pack, first query) for runs of up to kQueries queries.
template <class Body>
INLINE void in_tiles(int queries, const Body& body) {
    int i = 0;
    if constexpr (kQueries >= 4)
        for (; queries - i >= 4; i += 4) body(Range<4>{}, i);
    if constexpr (kQueries >= 3)
        for (; queries - i >= 3; i += 3) body(Range<3>{}, i);
    if constexpr (kQueries >= 2)
        for (; queries - i >= 2; i += 2) body(Range<2>{}, i);
    for (; i < queries; ++i) body(Range<1>{}, i);
}

template <bool f32>
struct Attention {
    const AttentionJob& job;
    const int dim = job.dim_padded, row = job.dim_padded * (f32 ? 4 : 2);
    int begin[kMaxQueries], end[kMaxQueries];  // what each query sees of the current block
    float peaks[kMaxQueries], totals[kMaxQueries];
    alignas(64) float scores[kMaxQueries][kBlock];
    float* sums[kMaxQueries];  // a block's weighted values
    const Query<f32>* query[kMaxQueries];
    alignas(64) uint16_t rounded[kPairs<f32> ? kMaxQueries : 1][kMaxHead];

    void take_queries() {
        for (int i = 0; i < job.queries; ++i) {
            if constexpr (kPairs<f32>) {
                for (int d = 0; d < dim; ++d) rounded[i][d] = float_to_bf16(job.q[i][d]);
                query[i] = rounded[i];
            } else {
                query[i] = job.q[i];
            }
        }
    }

    // A block that no query sees through a tree's path.
    void chain_block(const uint8_t* keys, const uint8_t* values, const uint8_t* upcoming) {
        in_tiles(job.queries,
                 [&](auto pack, int i) { score_block<f32>(pack, query + i, keys, values, upcoming, dim, scores + i); });
        for (int i = 0; i < job.queries; ++i)
            if (begin[i] < end[i]) soften(scores[i], begin[i], end[i], &peaks[i], &totals[i]);
        in_tiles(job.queries, [&](auto pack, int i) { tile_values(pack, i, values); });
    }

    // What all queries of the tile see is added for all at once, the rest query by query; for each in order.
    template <int... t>
    void tile_values(Pack<t...> pack, int first, const uint8_t* values) {
        int from = 0, to = kBlock;
        ((from = begin[first + t] > from ? begin[first + t] : from), ...);
        ((to = end[first + t] < to ? end[first + t] : to), ...);
        const bool shared = from < to;
        const auto alone = [&](int i, int a, int b) {
            if (a < b) add_range<f32>(Range<1>{}, scores + i, values, dim, a, b, sums + i);
        };
        (alone(first + t, begin[first + t], shared ? from : end[first + t]), ...);
        if (!shared) return;
        add_range<f32>(pack, scores + first, values, dim, from, to, sums + first);
        (alone(first + t, to, end[first + t]), ...);
    }

    // Cached positions stand in their slots; later ones are looked up along the query's path.
    void tree_block(int i, int base, const uint8_t* keys, const uint8_t* values) {
        int cached = job.path[i] ? job.cached - base : end[i];
        cached = cached < begin[i] ? begin[i] : cached > end[i] ? end[i] : cached;
        if (cached > begin[i]) score_block<f32>(Range<1>{}, query + i, keys, values, values, dim, scores + i);
        for (int p = cached; p < end[i]; ++p) {
            const int slot = job.path[i][base + p - job.cached];
            scores[i][p] = score_slot<f32>(query[i], job.blocks[slot / kBlock] + job.keys, slot % kBlock, dim);
        }
        soften(scores[i], begin[i], end[i], &peaks[i], &totals[i]);
        if (cached > begin[i]) add_range<f32>(Range<1>{}, scores + i, values, dim, begin[i], cached, sums + i);
        for (int p = cached; p < end[i]; ++p) {
            const int slot = job.path[i][base + p - job.cached];
            const uint8_t* value = job.blocks[slot / kBlock] + job.values + slot % kBlock * row;
            add_range<f32>(Range<1>{}, scores + i, value - p * row, dim, p, p + 1, sums + i);
        }
    }

    void block(int index, bool final) {
        const int base = index * kBlock;
        bool chains = true;
        for (int i = 0; i < job.queries; ++i) {
            begin[i] = job.first[i] > base ? job.first[i] - base : 0;
            end[i] = job.position[i] + 1 - base;
            end[i] = end[i] > kBlock ? kBlock : end[i];
            chains = chains && (!job.path[i] || base + end[i] <= job.cached);
        }
        const uint8_t* keys = job.blocks[index] + job.keys;
        const uint8_t* values = job.blocks[index] + job.values;
        if (chains) return chain_block(keys, values, final ? job.upcoming : job.blocks[index + 1] + job.keys);
        for (int i = 0; i < job.queries; ++i)
            if (begin[i] < end[i]) tree_block(i, base, keys, values);
    }

    void run() {
        int first = job.position[0], last = 0;
        for (int i = 0; i < job.queries; ++i) {
            last = job.position[i] > last ? job.position[i] : last;
            first = job.first[i] < first ? job.first[i] : first;
        }
        first = first / kBlock > job.block_begin ? first / kBlock : job.block_begin;
        last = last / kBlock + 1 < job.block_end ? last / kBlock + 1 : job.block_end;
        if (first >= last) return;
        take_queries();
        Merged merged[kMaxQueries];
        alignas(64) float local[kMaxQueries][kMaxHead];
        for (int i = 0; i < job.queries && !job.parts[i]; ++i)
            for (int d = 0; d < dim; d += 16) store(job.out[i] + d, zero());
        for (int index = first; index < last; ++index) {
            for (int i = 0; i < job.queries; ++i) {
                sums[i] = job.parts[i] ? job.parts[i] + static_cast<int64_t>(index) * job.part_stride + 16 : local[i];
                for (int d = 0; d < dim; d += 16) store(sums[i] + d, zero());
            }
            block(index, index + 1 == last);
            for (int i = 0; i < job.queries; ++i) {
                if (begin[i] >= end[i]) continue;
                if (!job.parts[i]) {
                    merged[i].add(peaks[i], totals[i], local[i], job.out[i], dim);
                } else {
                    sums[i][-16] = peaks[i];
                    sums[i][-15] = totals[i];
                }
            }
        }
        for (int i = 0; i < job.queries && !job.parts[i]; ++i) merged[i].finish(job.out[i], dim);
    }
};

static void attention(const AttentionJob& job) {
    if (job.kv_f32)
        Attention<true>{job}.run();
    else
        Attention<false>{job}.run();
}

// The blocks that several jobs left in `parts`, merged as one job would have.
static void merge_parts(const AttentionJob& job) {
    for (int i = 0; i < job.queries; ++i) {
        Merged merged;
        for (int d = 0; d < job.dim_padded; d += 16) store(job.out[i] + d, zero());
        for (int index = job.first[i] / kBlock; index <= job.position[i] / kBlock; ++index) {
            const float* part = job.parts[i] + static_cast<int64_t>(index) * job.part_stride;
            merged.add(part[0], part[1], part + 16, job.out[i], job.dim_padded);
        }
        merged.finish(job.out[i], job.dim_padded);
    }
}

}  // namespace OUTPACE_NS
}  // namespace outpace
