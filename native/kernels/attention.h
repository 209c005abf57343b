// Attention of a few query vectors over one KV head of one row, in blocks of 64 positions.
//
// For each query alone: a block's scores stand in the order of positions, whatever slots they came from; the block's
// peak, weights, their sum and the weighted values are formed in a fixed shape, values position after position, and
// depend on that block only; blocks are then merged in order. So a result depends on the query, its position and what
// stands at the positions it sees: not on the other queries of the job, nor on who computed which block. Positions that
// a query does not see are skipped: their values are never read.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/kv_block.h"
#include "runtime/denormals.h"

namespace outpace {
namespace OUTPACE_NS {

// What has been merged so far, and one block more: out = out * keep + block * take, with weights relative to the new peak.
// A query a lane; a block that a query does not see has the peak -inf and the total 0, and changes nothing.
struct Merged {
    alignas(64) float peak[kMaxQueries], total[kMaxQueries], keep[kMaxQueries], take[kMaxQueries];
    const int queries;

    // A sink is there before all blocks, as one that has no values.
    explicit Merged(const AttentionJob& job) : queries(job.queries) {
        for (int i = 0; i < queries; i += 16) {
            store(peak + i, job.sinks ? load_some(job.sink + i, queries - i, -INFINITY) : set1(-INFINITY));
            store(total + i, job.sinks ? set1(1.0f) : zero());
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
    // 16 dimensions of query i.
    void apply(int i, F block, float* out) const { store(out, fma(block, set1(take[i]), mul(load(out), set1(keep[i])))); }
    // `split`: how many dimensions stand as split_dims says; they are put in order.
    void finish(int i, float* out, int dim, int split) const {
        const F inverse = set1(1.0f / total[i]);
        int d = 0;
        for (; d < split; d += 32) store_woven(out + d, mul(load(out + d), inverse), mul(load(out + d + 16), inverse));
        for (; d < dim; d += 16) store(out + d, mul(load(out + d), inverse));
    }
};

template <KVType type>
struct Attention {
    const AttentionJob& job;
    const int dim = job.dim_padded;  // of keys
    const int value_dim = job.value_padded, row = job.value_padded * element_bytes(type);
    const bool whole = job.parts[0] == nullptr;
    Merged merged{job};
    int base;  // the block's first position
    // What each query sees of the block, and from where on it looks up its slots along its path. Queries that see nothing are
    // left out below.
    int begin[kMaxQueries], end[kMaxQueries], own[kMaxQueries];
    float* sums[kMaxQueries];  // weighted values: those of the block, or, where the job is `whole`, merged so far
    alignas(64) float peaks[kMaxQueries], totals[kMaxQueries];
    alignas(64) float scores[kMaxQueries][kBlock];
    alignas(64) Query<type> query[kMaxQueries][kMaxHead];

    explicit Attention(const AttentionJob& j) : job(j) {}  // no braces around it: nothing is to be zeroed

    bool sees(int i) const { return begin[i] < end[i]; }

    void take_queries() {
        for (int i = job.queries; i < round_up(job.queries, 16); ++i) peaks[i] = totals[i] = 0.0f;  // lanes without a query
        for (int i = 0; i < job.queries; ++i)
            for (int d = 0; d < dim; ++d) {
                if constexpr (kPairs<type>)
                    query[i][d] = static_cast<uint16_t>(bf16_in_float(job.q[i][d]) >> 16);
                else if constexpr (type == KVType::BF16)
                    query[i][d] = bits_to_float(bf16_in_float(job.q[i][d]));
                else
                    query[i][d] = job.q[i][d];
            }
    }

    // Where a position that query i sees stands.
    struct Place {
        const uint8_t* block;
        int slot;
    };
    Place place(int i, int p) const {
        const int slot = p < own[i] ? base + p : job.path[i][base + p - job.cached];
        return {job.blocks[slot / kBlock], slot % kBlock};
    }

    // Scores of the block's slots; those of a tree's query go on to the order of positions.
    void score(const uint8_t* block, int tiles, Fetch& fetch) {
        const uint8_t* keys = block + job.keys;
        const float* scales = scales_of<type>(keys, dim);
        for (int k = 0; k < tiles; k += kVectors)
            with_range<kVectors>(tiles - k < kVectors ? tiles - k : kVectors, [&](auto some) {
                in_tiles(job.queries, [&](auto pack, int i) {
                    score_tile<type>(pack, some, query + i, keys + k * key_tile_bytes<type>(dim), scales ? scales + kSub * k : nullptr, dim,
                        fetch, scores[i] + kSub * k);
                });
            });
        for (int i = 0; i < job.queries; ++i) {
            if (own[i] >= end[i]) continue;
            float slots[kBlock];
            std::memcpy(slots, scores[i], sizeof slots);
            for (int p = own[i]; p < end[i]; ++p) {
                const Place at = place(i, p);
                if (at.block == block) {
                    scores[i][p] = slots[at.slot];
                } else {
                    Fetch none;
                    const int tile = at.slot / kSub;
                    float lanes[kSub];
                    const uint8_t* other = at.block + job.keys;
                    score_tile<type>(Range<1>{}, Range<1>{}, query + i, other + tile * key_tile_bytes<type>(dim),
                        scales ? scales_of<type>(other, dim) + kSub * tile : nullptr, dim, none, lanes);
                    scores[i][p] = lanes[at.slot % kSub];
                }
            }
        }
    }

    // Scores, capped where the model does that -> their peak, weights relative to it, and their sum; the unseen weigh nothing. Then the values' scales, where those
    // have any. One step for all queries, then the next: each is a chain that leaves most of the machine idle.
    void weigh(const float* scales) {
        for (int i = 0; i < job.queries; ++i) {
            float* s = scores[i];
            if (!sees(i)) continue;
            for (int p = 0; p < kBlock && job.cap > 0.0f; p += 16) store(s + p, soft_cap(load(s + p), set1(job.cap)));
            for (int p = 0; p < begin[i]; ++p) s[p] = -INFINITY;
            for (int p = end[i]; p < kBlock; ++p) s[p] = -INFINITY;
            peaks[i] = peak(max(max(load(s), load(s + 16)), max(load(s + 32), load(s + 48))));
        }
        for (int i = 0; i < job.queries; ++i) {
            if (!sees(i)) continue;
            const F shift = set1(peaks[i]);
            for (int p = 0; p < kBlock; p += 16) store(scores[i] + p, exp_down(sub(load(scores[i] + p), shift)));
        }
        for (int i = 0; i < job.queries; ++i) {
            float* s = scores[i];
            if (!sees(i)) continue;
            totals[i] = sum(add(add(load(s), load(s + 16)), add(load(s + 32), load(s + 48))));
            if (scales && own[i] >= end[i])
                for (int p = 0; p < kBlock; p += 16) store(s + p, mul(load(s + p), load(scales + p)));
            for (int p = begin[i]; scales && own[i] < end[i] && p < end[i]; ++p) {
                const Place at = place(i, p);
                s[p] = times(s[p], scales_of<type>(at.block + job.values, value_dim)[at.slot]);
            }
        }
    }

    // Dimensions d, d + 1, ... of the weighted values of queries first + i, position after position; then merged.
    template <int... i, int... c>
    void value_tile(Pack<i...>, Pack<c...> vectors, int first, int d, const uint8_t* values, Fetch& fetching) {
        int low = kBlock, high = 0, from = 0, to = kBlock;  // positions that one of them sees; that all see in their own slots
        const auto span = [&](int q) {
            const int shared = own[q] < end[q] ? own[q] : end[q];
            if (sees(q)) low = begin[q] < low ? begin[q] : low, high = end[q] > high ? end[q] : high;
            from = begin[q] > from ? begin[q] : from;
            to = shared < to ? shared : to;
        };
        (span(first + i), ...);
        Fetch fetch = fetching;
        const int at = d * element_bytes(type);
        Vectors<sizeof...(c)> acc[] = {(static_cast<void>(i), zeros(vectors))...};
        const auto add = [&](auto& to, const auto& value, float weight) __attribute__((always_inline)) {
            const F w = set1(weight);
            ((to.of[c] = fma(w, value.of[c], to.of[c])), ...);
        };
        const auto alone = [&](auto& to, int q, int p) __attribute__((always_inline)) {
            if (p < begin[q] || p >= end[q]) return;
            const Place found = place(q, p);
            add(to, load_value<type>(vectors, found.block + job.values + found.slot * row + at), scores[q][p]);
        };
        for (int p = low; p < high; ++p) {
            for (; p >= from && p < to; ++p) {
                fetch.step();
                const auto value = load_value<type>(vectors, values + p * row + at);
                (add(acc[i], value, scores[first + i][p]), ...);
            }
            if (p < high) (alone(acc[i], first + i, p), ...);
        }
        fetching = fetch;
        const auto put = [&](const auto& block, int q) {
            float* out = sums[q] + d;
            if (!sees(q)) return;
            if (whole)
                (merged.apply(q, block.of[c], out + 16 * c), ...);
            else
                (store(out + 16 * c, block.of[c]), ...);
        };
        (put(acc[i], first + i), ...);
    }

    // `next`: keys that will be needed after this block, and the values that follow them.
    void block(int index, const uint8_t* next) {
        base = index * kBlock;
        int high = 0;
        for (int i = 0; i < job.queries; ++i) {
            begin[i] = job.first[i] > base ? job.first[i] - base : 0;
            end[i] = job.position[i] + 1 - base;
            end[i] = end[i] > kBlock ? kBlock : end[i];
            own[i] = !job.path[i] ? kBlock : job.cached > base ? job.cached - base : 0;
            const int slots = own[i] < end[i] ? kBlock : end[i];
            high = slots > high ? slots : high;
            peaks[i] = -INFINITY;
            totals[i] = 0.0f;
        }
        const uint8_t* values = job.blocks[index] + job.values;
        const int tiles = (job.queries + kQueries - 1) / kQueries, passes = value_dim / kTileDims + value_dim % kTileDims / 16;
        const int steps = tiles * (dim / 2 + passes * high) + 1,
                  bytes = static_cast<int>(part_bytes(type, dim) + part_bytes(type, value_dim));
        Fetch fetch{next, next + bytes, (bytes / 64 + steps - 1) / steps};
        score(job.blocks[index], (high + kSub - 1) / kSub, fetch);
        weigh(scales_of<type>(values, value_dim));
        if (whole) merged.add(peaks, totals);
        in_tiles(job.queries, [&](auto pack, int i) {
            int d = 0;
            for (; d + kTileDims <= value_dim; d += kTileDims) value_tile(pack, Range<kVectors>{}, i, d, values, fetch);
            for (; d < value_dim; d += 16) value_tile(pack, Range<1>{}, i, d, values, fetch);
        });
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
        for (int i = 0; i < job.queries && whole; ++i) {
            sums[i] = job.out[i];
            for (int d = 0; d < value_dim; d += 16) store(sums[i] + d, zero());
        }
        for (int index = first; index < last; ++index) {
            for (int i = 0; i < job.queries && !whole; ++i) sums[i] = job.parts[i] + static_cast<int64_t>(index) * job.part_stride + 16;
            block(index, index + 1 == last ? job.upcoming : job.blocks[index + 1] + job.keys);
            for (int i = 0; i < job.queries && !whole; ++i) {
                if (!sees(i)) continue;
                sums[i][-16] = peaks[i];
                sums[i][-15] = totals[i];
            }
        }
        for (int i = 0; i < job.queries && whole; ++i) merged.finish(i, job.out[i], value_dim, split_dims<type>(value_dim));
    }
};

static void attention(const AttentionJob& job) {
    if (job.type == KVType::F32)
        Attention<KVType::F32>(job).run();
    else if (job.type == KVType::I8)
        Attention<KVType::I8>(job).run();
    else if (job.type == KVType::F16)
        Attention<KVType::F16>(job).run();
    else
        Attention<KVType::BF16>(job).run();
}

// The blocks that several jobs left in `parts`, merged as one job would have.
static void merge_parts(const AttentionJob& job) {
    Merged merged(job);
    int first = job.position[0], last = 0;
    for (int i = 0; i < job.queries; ++i) {
        last = job.position[i] > last ? job.position[i] : last;
        first = job.first[i] < first ? job.first[i] : first;
        for (int d = 0; d < job.value_padded; d += 16) store(job.out[i] + d, zero());
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
            for (int d = 0; d < job.value_padded && sees(i); d += 16) merged.apply(i, load(part(i) + 16 + d), job.out[i] + d);
    }
    const int split = job.type == KVType::BF16 ? split_dims<KVType::BF16>(job.value_padded) : 0;
    for (int i = 0; i < job.queries; ++i) merged.finish(i, job.out[i], job.value_padded, split);
}

}  // namespace OUTPACE_NS
}  // namespace outpace
