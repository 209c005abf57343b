// Attention of a few query vectors over one KV head of one row, in blocks of 64 positions.
//
// For each query alone: a block's scores stand in the order of positions, whatever slots they came from; the block's
// peak, weights, their sum and the weighted values are formed in a fixed shape, values position after position, and
// depend on that block only; blocks are then merged in order. So a result depends on the query, its position and what
// stands at the positions it sees: not on the other queries of the job, nor on who computed which block. Positions that
// a query does not see are skipped: their values are never read.
#pragma once

#include <cmath>

#include "kernels/kv_block.h"

namespace outpace {
namespace OUTPACE_NS {

// A block's scores [queries][64] of positions [begin, end) -> their peak; the unseen become -inf. Queries that see nothing
// are left out here and below. One step for all queries, then the next: each is a chain that leaves most of the machine idle.
INLINE void find_peaks(float (*scores)[kBlock], int queries, const int* begin, const int* end, float* peaks) {
    for (int i = 0; i < queries; ++i) {
        float* s = scores[i];
        if (begin[i] >= end[i]) continue;
        for (int p = 0; p < begin[i]; ++p) s[p] = -INFINITY;
        for (int p = end[i]; p < kBlock; ++p) s[p] = -INFINITY;
        peaks[i] = peak(max(max(load(s), load(s + 16)), max(load(s + 32), load(s + 48))));
    }
}

// Scores -> weights relative to the peak, and their sum; then times the values' scales, where those have any.
INLINE void weigh_scores(
    float (*scores)[kBlock], int queries, const int* begin, const int* end, const float* peaks, const float* scales, float* totals) {
    for (int i = 0; i < queries; ++i) {
        if (begin[i] >= end[i]) continue;
        const F shift = set1(peaks[i]);
        for (int p = 0; p < kBlock; p += 16) store(scores[i] + p, exp_down(sub(load(scores[i] + p), shift)));
    }
    for (int i = 0; i < queries; ++i) {
        float* s = scores[i];
        if (begin[i] >= end[i]) continue;
        const F a = load(s), b = load(s + 16), c = load(s + 32), d = load(s + 48);
        totals[i] = sum(add(add(a, b), add(c, d)));
        if (!scales) continue;
        store(s, mul(a, load(scales)));
        store(s + 16, mul(b, load(scales + 16)));
        store(s + 32, mul(c, load(scales + 32)));
        store(s + 48, mul(d, load(scales + 48)));
    }
}

// What has been merged so far, and one block more: out = out * keep + block * take, with weights relative to the new peak.
// A query a lane; a block that a query does not see has the peak -inf and the total 0, and changes nothing.
struct Merged {
    alignas(64) float peak[kMaxQueries], total[kMaxQueries], keep[kMaxQueries], take[kMaxQueries];
    const int queries;

    explicit Merged(int n) : queries(n) {
        for (int i = 0; i < queries; i += 16) {
            store(peak + i, set1(-INFINITY));
            store(total + i, zero());
        }
    }
    void add(const float* block_peak, const float* block_total) {
        for (int i = 0; i < queries; i += 16) {
            const F before = load(peak + i), fresh = load(block_peak + i), top = max(fresh, before);
            const F k = select(less(before, top), exp_down(sub(before, top)), set1(1.0f));
            const F t = select(less(fresh, top), exp_down(sub(fresh, top)), set1(1.0f));
            store(peak + i, top);
            store(total + i, outpace::OUTPACE_NS::add(mul(load(total + i), k), mul(load(block_total + i), t)));
            store(keep + i, k);
            store(take + i, t);
        }
    }
    void apply(int i, const float* block, float* out, int dim) const {
        const F k = set1(keep[i]), t = set1(take[i]);
        for (int d = 0; d < dim; d += 16) store(out + d, fma(load(block + d), t, mul(load(out + d), k)));
    }
    void finish(int i, float* out, int dim) const {
        const F inverse = set1(1.0f / total[i]);
        for (int d = 0; d < dim; d += 16) store(out + d, mul(load(out + d), inverse));
    }
};

template <KVType type>
struct Attention {
    const AttentionJob& job;
    const int dim = job.dim_padded, row = job.dim_padded * element_bytes(type);
    const bool wide = type != KVType::F32 && job.queries > kDirect;  // whether numbers become floats once for all queries
    int begin[kMaxQueries], end[kMaxQueries];  // what each query sees of the current block
    alignas(64) float peaks[kMaxQueries], totals[kMaxQueries];
    alignas(64) float scores[kMaxQueries][kBlock];
    float* sums[kMaxQueries];  // a block's weighted values
    const Query<type>* query[kMaxQueries];
    alignas(64) Query<type> rounded[type == KVType::BF16 ? kMaxQueries : 1][kMaxHead];
    alignas(64) float widened[type == KVType::F32 ? 16 : kBlock * kMaxHead];

    explicit Attention(const AttentionJob& j) : job(j) {}  // no braces around it: nothing is to be zeroed

    void take_queries() {
        for (int i = job.queries; i < round_up(job.queries, 16); ++i) peaks[i] = totals[i] = 0.0f;  // lanes without a query
        for (int i = 0; i < job.queries; ++i) {
            if constexpr (type == KVType::BF16) {
                Query<type>* out = rounded[i];
                for (int d = 0; d < dim; ++d) {
                    const uint32_t bits = bf16_in_float(job.q[i][d]);
                    if constexpr (kPairs<type>)
                        out[d] = static_cast<uint16_t>(bits >> 16);
                    else
                        out[d] = bits_to_float(bits);
                }
                query[i] = out;
            } else {
                query[i] = job.q[i];
            }
        }
    }

    // A block that no query sees through a tree's path; `next`: what will be needed after it.
    void chain_block(const uint8_t* keys, const uint8_t* values, const uint8_t* next_keys) {
        Fetch fetch{values, values + part_bytes(type, dim)};
        const float* scales = scales_of<type>(keys, dim);
        if (wide && !kPairs<type>) {
            widen_keys<type>(keys, dim, widened);
            score_all<kPairs<type> ? type : KVType::F32, true>(reinterpret_cast<const uint8_t*>(widened), scales, fetch);
        } else {
            score_all<type, false>(keys, scales, fetch);
        }
        find_peaks(scores, job.queries, begin, end, peaks);
        weigh_scores(scores, job.queries, begin, end, peaks, scales_of<type>(values, dim), totals);
        int from = kBlock, to = 0;
        for (int i = 0; i < job.queries; ++i) {
            if (begin[i] >= end[i]) continue;
            from = begin[i] < from ? begin[i] : from;
            to = end[i] > to ? end[i] : to;
        }
        fetch = {next_keys, next_keys + part_bytes(type, dim)};
        if (wide) {
            widen_values<type>(values, dim, from, to, widened);
            add_all<KVType::F32, true>(reinterpret_cast<const uint8_t*>(widened), fetch);
        } else {
            add_all<type, false>(values, fetch);
        }
    }

    template <KVType as, bool widely>
    void score_all(const uint8_t* keys, const float* scales, Fetch& fetch) {
        in_tiles(Pack<4, 3, 2, 1>{}, job.queries,
            [&](auto pack, int i) { score_block<as, widely>(pack, query + i, keys, scales, dim, fetch, scores + i); });
    }

    template <KVType as, bool widely>
    void add_all(const uint8_t* values, Fetch& fetch) {
        in_tiles(Pack<4, 3, 2, 1>{}, job.queries, [&](auto pack, int i) { tile_values<as, widely>(pack, i, values, fetch); });
    }

    // What all queries of the tile see is added for all at once, the rest query by query; for each in order.
    template <KVType as, bool widely, int... t>
    void tile_values(Pack<t...> pack, int first, const uint8_t* values, Fetch& fetch) {
        int from = 0, to = kBlock;
        ((from = begin[first + t] > from ? begin[first + t] : from), ...);
        ((to = end[first + t] < to ? end[first + t] : to), ...);
        const bool shared = from < to;
        const auto alone = [&](int i, int a, int b) {
            if (a < b) add_range<as, widely>(Range<1>{}, scores + i, values, dim, a, b, fetch, sums + i);
        };
        (alone(first + t, begin[first + t], shared ? from : end[first + t]), ...);
        if (!shared) return;
        add_range<as, widely>(pack, scores + first, values, dim, from, to, fetch, sums + first);
        (alone(first + t, to, end[first + t]), ...);
    }

    // Cached positions stand in their slots; later ones are looked up along the query's path.
    void tree_block(int i, int base, const uint8_t* keys, const uint8_t* values) {
        Fetch none;
        int cached = job.path[i] ? job.cached - base : end[i];
        cached = cached < begin[i] ? begin[i] : cached > end[i] ? end[i] : cached;
        if (cached > begin[i]) score_block<type, false>(Range<1>{}, query + i, keys, scales_of<type>(keys, dim), dim, none, scores + i);
        alignas(64) float own[kBlock];  // the values' scales in the order of positions
        const float* scales = scales_of<type>(values, dim);
        for (int p = 0; scales && p < kBlock; ++p) own[p] = p >= begin[i] && p < cached ? scales[p] : 0.0f;
        for (int p = cached; p < end[i]; ++p) {
            const int slot = job.path[i][base + p - job.cached];
            const uint8_t* block = job.blocks[slot / kBlock];
            scores[i][p] = score_slot<type>(query[i], block + job.keys, slot % kBlock, dim);
            if (scales) own[p] = scales_of<type>(block + job.values, dim)[slot % kBlock];
        }
        find_peaks(scores + i, 1, begin + i, end + i, peaks + i);
        weigh_scores(scores + i, 1, begin + i, end + i, peaks + i, scales ? own : nullptr, totals + i);
        if (cached > begin[i]) add_range<type, false>(Range<1>{}, scores + i, values, dim, begin[i], cached, none, sums + i);
        for (int p = cached; p < end[i]; ++p) {
            const int slot = job.path[i][base + p - job.cached];
            const uint8_t* value = job.blocks[slot / kBlock] + job.values + slot % kBlock * row;
            add_range<type, false>(Range<1>{}, scores + i, value - p * row, dim, p, p + 1, none, sums + i);
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
            peaks[i] = -INFINITY;
            totals[i] = 0.0f;
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
        Merged merged(job.queries);
        alignas(64) float local[kMaxQueries * kMaxHead];
        const bool whole = job.parts[0] == nullptr;
        for (int i = 0; i < job.queries && whole; ++i)
            for (int d = 0; d < dim; d += 16) store(job.out[i] + d, zero());
        for (int index = first; index < last; ++index) {
            for (int i = 0; i < job.queries; ++i) {
                sums[i] = whole ? local + i * dim : job.parts[i] + static_cast<int64_t>(index) * job.part_stride + 16;
                for (int d = 0; d < dim; d += 16) store(sums[i] + d, zero());
            }
            block(index, index + 1 == last);
            if (whole) merged.add(peaks, totals);
            for (int i = 0; i < job.queries; ++i) {
                if (begin[i] >= end[i]) continue;
                if (whole) {
                    merged.apply(i, sums[i], job.out[i], dim);
                } else {
                    sums[i][-16] = peaks[i];
                    sums[i][-15] = totals[i];
                }
            }
        }
        for (int i = 0; i < job.queries && whole; ++i) merged.finish(i, job.out[i], dim);
    }
};

static void attention(const AttentionJob& job) {
    if (job.type == KVType::F32)
        Attention<KVType::F32>(job).run();
    else if (job.type == KVType::I8)
        Attention<KVType::I8>(job).run();
    else
        Attention<KVType::BF16>(job).run();
}

// The blocks that several jobs left in `parts`, merged as one job would have.
static void merge_parts(const AttentionJob& job) {
    Merged merged(job.queries);
    int first = job.position[0], last = 0;
    for (int i = 0; i < job.queries; ++i) {
        last = job.position[i] > last ? job.position[i] : last;
        first = job.first[i] < first ? job.first[i] : first;
        for (int d = 0; d < job.dim_padded; d += 16) store(job.out[i] + d, zero());
    }
    for (int index = first / kBlock; index <= last / kBlock; ++index) {
        alignas(64) float peaks[kMaxQueries]{}, totals[kMaxQueries]{};
        const auto part = [&](int i) { return job.parts[i] + static_cast<int64_t>(index) * job.part_stride; };
        const auto sees = [&](int i) { return index >= job.first[i] / kBlock && index <= job.position[i] / kBlock; };
        for (int i = 0; i < job.queries; ++i) {
            peaks[i] = sees(i) ? part(i)[0] : -INFINITY;
            totals[i] = sees(i) ? part(i)[1] : 0.0f;
        }
        merged.add(peaks, totals);
        for (int i = 0; i < job.queries; ++i)
            if (sees(i)) merged.apply(i, part(i) + 16, job.out[i], job.dim_padded);
    }
    for (int i = 0; i < job.queries; ++i) merged.finish(i, job.out[i], job.dim_padded);
}

}  // namespace OUTPACE_NS
}  // namespace outpace
