// Attention of a few query vectors over one KV head of one row, in blocks of 64 positions.
//
// For each query alone: a block's scores stand in the order of positions, whatever slots they came from; the block's
// peak, weights and their sum are formed in a fixed shape; values are added position after position; blocks are combined
// in order by the online softmax. So a result depends on the query, its position and what stands at the positions it
// sees, and on nothing else. Positions it does not see are skipped: their values are never read.
//
// Keys of a block: bf16 [4 x 16 slots][dim / 2][16][2], or f32 [4 x 16 slots][dim][16]. Values: [64 slots][dim].
#pragma once

#include <cmath>

#include "../halves.h"
#include "math.h"
#include "table.h"

namespace outpace {
namespace OUTPACE_NS {

constexpr int kSub = 16;                // slots of a key tile
constexpr int kSubs = kBlock / kSub;

template <bool f32>
INLINE int key_tile_bytes(int dim) {
    return dim * kSub * (f32 ? 4 : 2);
}

// scores[q][sub * 16 + lane] for S key tiles that start at `keys`.
template <bool f32, int Q, int S>
INLINE void score_tiles(const float* const* q, const uint8_t* keys, int dim, float (*scores)[kBlock]) {
    F acc[Q][S];
    for (int i = 0; i < Q; ++i)
        for (int s = 0; s < S; ++s) acc[i][s] = zero();
    const int tile_bytes = key_tile_bytes<f32>(dim);
    for (int d = 0; d < dim; d += 2) {
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            const uint8_t* k = keys + s * tile_bytes + d * kSub * (f32 ? 4 : 2);
            F first, second;
            if (f32) {
                first = load(reinterpret_cast<const float*>(k));
                second = load(reinterpret_cast<const float*>(k) + kSub);
            } else {
                const I pairs = load_pairs(k);
                first = pair_low(pairs);
                second = pair_high(pairs);
            }
#pragma GCC unroll 4
            for (int i = 0; i < Q; ++i) {
                acc[i][s] = fma(first, set1(q[i][d]), acc[i][s]);
                acc[i][s] = fma(second, set1(q[i][d + 1]), acc[i][s]);
            }
        }
    }
    for (int i = 0; i < Q; ++i)
        for (int s = 0; s < S; ++s) store(scores[i] + s * kSub, acc[i][s]);
}

template <bool f32>
INLINE F load_value(const uint8_t* v, int d) {
    return f32 ? load(reinterpret_cast<const float*>(v) + d) : load_bf16(reinterpret_cast<const uint16_t*>(v) + d);
}

// out[q] = out[q] * keep[q] + sum over positions of weights[q][position] * value, for Q queries that see all 64.
template <bool f32, int Q, int C>
INLINE void add_values(float (*weights)[kBlock], const float* keep, const uint8_t* values, int dim_padded,
                       float* const* out) {
    const int row = dim_padded * (f32 ? 4 : 2);
    for (int d = 0; d < dim_padded; d += 16 * C) {
        F acc[Q][C];
        for (int i = 0; i < Q; ++i)
            for (int c = 0; c < C; ++c) acc[i][c] = mul(load(out[i] + d + 16 * c), set1(keep[i]));
        for (int p = 0; p < kBlock; ++p) {
            F v[C];
            for (int c = 0; c < C; ++c) v[c] = load_value<f32>(values + p * row, d + 16 * c);
#pragma GCC unroll 4
            for (int i = 0; i < Q; ++i) {
                const F weight = set1(weights[i][p]);
                for (int c = 0; c < C; ++c) acc[i][c] = fma(weight, v[c], acc[i][c]);
            }
        }
        for (int i = 0; i < Q; ++i)
            for (int c = 0; c < C; ++c) store(out[i] + d + 16 * c, acc[i][c]);
    }
}

// The same sums for one query that sees positions [begin, end) of the block, value by value.
template <bool f32, int C>
INLINE void add_some_values(const float* weights, float keep, const uint8_t* const* value, int begin, int end,
                            int dim_padded, float* out) {
    for (int d = 0; d < dim_padded; d += 16 * C) {
        F acc[C];
        for (int c = 0; c < C; ++c) acc[c] = mul(load(out + d + 16 * c), set1(keep));
        for (int p = begin; p < end; ++p) {
            const F weight = set1(weights[p]);
            for (int c = 0; c < C; ++c) acc[c] = fma(weight, load_value<f32>(value[p], d + 16 * c), acc[c]);
        }
        for (int c = 0; c < C; ++c) store(out + d + 16 * c, acc[c]);
    }
}

// Scores in place -> weights relative to the new peak; updates peak and total; returns what to keep of earlier sums.
INLINE float soften(float* scores, int begin, int end, float* peak_so_far, float* total) {
    for (int p = 0; p < begin; ++p) scores[p] = -INFINITY;
    for (int p = end; p < kBlock; ++p) scores[p] = -INFINITY;
    const F a = load(scores), b = load(scores + 16), c = load(scores + 32), d = load(scores + 48);
    const float block_peak = peak(max(max(a, b), max(c, d)));
    const float top = block_peak > *peak_so_far ? block_peak : *peak_so_far;
    const F shift = set1(top);
    const F ea = exp(sub(a, shift)), eb = exp(sub(b, shift)), ec = exp(sub(c, shift)), ed = exp(sub(d, shift));
    store(scores, ea);
    store(scores + 16, eb);
    store(scores + 32, ec);
    store(scores + 48, ed);
    float lanes[16];
    store(lanes, exp(set1(*peak_so_far - top)));
    *peak_so_far = top;
    *total = *total * lanes[0] + sum(add(add(ea, eb), add(ec, ed)));
    return lanes[0];
}

template <bool f32>
static void attend(const AttentionJob& job) {
    alignas(64) float scores[kMaxQueries][kBlock];
    float peaks[kMaxQueries], totals[kMaxQueries], keep[kMaxQueries];
    int last = 0, first = job.position[0];
    for (int i = 0; i < job.queries; ++i) {
        peaks[i] = -INFINITY;
        totals[i] = 0.0f;
        for (int d = 0; d < job.dim_padded; ++d) job.out[i][d] = 0.0f;
        last = job.position[i] > last ? job.position[i] : last;
        first = job.first[i] < first ? job.first[i] : first;
    }
    const int dim = job.dim_padded;
    const int row = dim * (f32 ? 4 : 2);
    for (int block = first / kBlock; block <= last / kBlock; ++block) {
        const int base = block * kBlock;
        bool chains = true, whole = true;
        int begin[kMaxQueries], end[kMaxQueries];
        for (int i = 0; i < job.queries; ++i) {
            begin[i] = job.first[i] > base ? job.first[i] - base : 0;
            end[i] = job.position[i] + 1 - base;
            end[i] = end[i] > kBlock ? kBlock : end[i];
            chains = chains && (!job.path[i] || base + end[i] <= job.cached);
            whole = whole && begin[i] == 0 && end[i] == kBlock;
        }
        const uint8_t* keys = job.blocks[block] + job.keys;
        const uint8_t* values = job.blocks[block] + job.values;
        if (chains) {
            int i = 0;
            if constexpr (kQueries >= 4)
                for (; i + 4 <= job.queries; i += 4) score_tiles<f32, 4, 4>(job.q + i, keys, dim, scores + i);
            if constexpr (kQueries >= 2)
                for (; i + 2 <= job.queries; i += 2) score_tiles<f32, 2, 4>(job.q + i, keys, dim, scores + i);
            for (; i < job.queries; ++i) score_tiles<f32, 1, 4>(job.q + i, keys, dim, scores + i);
            for (i = 0; i < job.queries; ++i)
                if (begin[i] < end[i]) keep[i] = soften(scores[i], begin[i], end[i], &peaks[i], &totals[i]);
            if (whole) {
                i = 0;
                if constexpr (kQueries >= 4) {
                    for (; i + 4 <= job.queries; i += 4) {
                        if (dim % 64 == 0)
                            add_values<f32, 4, 4>(scores + i, keep + i, values, dim, job.out + i);
                        else
                            add_values<f32, 4, 1>(scores + i, keep + i, values, dim, job.out + i);
                    }
                }
                for (; i < job.queries; ++i) {
                    if (dim % 64 == 0)
                        add_values<f32, 1, 4>(scores + i, keep + i, values, dim, job.out + i);
                    else
                        add_values<f32, 1, 1>(scores + i, keep + i, values, dim, job.out + i);
                }
                continue;
            }
        }
        for (int i = 0; i < job.queries; ++i) {
            if (begin[i] >= end[i]) continue;
            const uint8_t* value[kBlock];
            for (int p = begin[i]; p < end[i]; ++p) value[p] = values + p * row;
            if (!chains) {
                // Cached positions stand in their slots; the others are looked up along the path.
                int cached = job.path[i] ? job.cached - base : end[i];
                cached = cached < begin[i] ? begin[i] : cached > end[i] ? end[i] : cached;
                if (cached > begin[i]) score_tiles<f32, 1, 4>(job.q + i, keys, dim, scores + i);
                for (int p = cached; p < end[i]; ++p) {
                    const int slot = job.path[i][base + p - job.cached];
                    const uint8_t* home = job.blocks[slot / kBlock];
                    const int in_block = slot % kBlock;
                    float lanes[1][kBlock];
                    score_tiles<f32, 1, 1>(job.q + i, home + job.keys + in_block / kSub * key_tile_bytes<f32>(dim), dim,
                                           lanes);
                    scores[i][p] = lanes[0][in_block % kSub];
                    value[p] = home + job.values + in_block * row;
                }
                keep[i] = soften(scores[i], begin[i], end[i], &peaks[i], &totals[i]);
            }
            if (dim % 64 == 0)
                add_some_values<f32, 4>(scores[i], keep[i], value, begin[i], end[i], dim, job.out[i]);
            else
                add_some_values<f32, 1>(scores[i], keep[i], value, begin[i], end[i], dim, job.out[i]);
        }
    }
    for (int i = 0; i < job.queries; ++i) {
        const F inverse = set1(1.0f / totals[i]);
        for (int d = 0; d < dim; d += 16) store(job.out[i] + d, mul(load(job.out[i] + d), inverse));
    }
}

static void attention(const AttentionJob& job) { job.kv_f32 ? attend<true>(job) : attend<false>(job); }

static void put_key(const float* k, int dim, int dim_padded, bool f32, uint8_t* keys, int slot) {
    const int lane = slot % kSub;
    if (f32) {
        float* tile = reinterpret_cast<float*>(keys) + slot / kSub * kSub * dim_padded;
        for (int d = 0; d < dim_padded; ++d) tile[d * kSub + lane] = d < dim ? k[d] : 0.0f;
    } else {
        uint16_t* tile = reinterpret_cast<uint16_t*>(keys) + slot / kSub * kSub * dim_padded;
        for (int d = 0; d < dim_padded; ++d)
            tile[(d / 2 * kSub + lane) * 2 + d % 2] = d < dim ? float_to_bf16(k[d]) : uint16_t{0};
    }
}

static void put_value(const float* v, int dim, int dim_padded, bool f32, uint8_t* values, int slot) {
    for (int d = 0; d < dim_padded; ++d) {
        const float x = d < dim ? v[d] : 0.0f;
        if (f32)
            reinterpret_cast<float*>(values)[slot * dim_padded + d] = x;
        else
            reinterpret_cast<uint16_t*>(values)[slot * dim_padded + d] = float_to_bf16(x);
    }
}

}  // namespace OUTPACE_NS
}  // namespace outpace
