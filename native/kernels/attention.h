// Attention of a few query vectors over one KV head of one row, in blocks of 64 positions.
//
// For each query alone: a block's scores stand in the order of positions, whatever slots they came from; the block's
// peak, weights, their sum and the weighted values are formed in a fixed shape, values position after position, and
// depend on that block only; blocks are then merged in order. So a result depends on the query, its position and what
// stands at the positions it sees: not on the other queries of the job, nor on who computed which block. Positions that
// a query does not see are skipped: their values are never read, or, as integers, meet a weight of 0.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/kv_integers.h"
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
    const int value_dim = job.value_padded, row = kv_row_bytes(type, job.value_padded);
    static constexpr bool whole_numbers = integers(type);
    static constexpr int most = whole_numbers ? kIntegerQueries : kQueries;  // queries of a tile
    const bool whole = job.parts[0] == nullptr;
    Merged merged{job};
    int base;  // the block's first position
    // What each query sees of the block, and from where on it looks up its slots along its path. Queries that see nothing are
    // left out below.
    int begin[kMaxQueries], end[kMaxQueries], own[kMaxQueries];
    float* sums[kMaxQueries];  // weighted values: those of the block, or, where the job is `whole`, merged so far
    alignas(64) float peaks[kMaxQueries], totals[kMaxQueries];
    alignas(64) float scores[kMaxQueries][kBlock];
    std::conditional_t<whole_numbers, SplitQuery, Query<type>[kMaxHead]> query[kMaxQueries];
    SplitWeights weights[whole_numbers ? kMaxQueries : 1][type == KVType::I4 ? kMaxGroups : 1];

    explicit Attention(const AttentionJob& j) : job(j) {}  // no braces around it: nothing is to be zeroed

    bool sees(int i) const { return begin[i] < end[i]; }

    void take_queries() {
        for (int i = job.queries; i < round_up(job.queries, 16); ++i) peaks[i] = totals[i] = 0.0f;  // lanes without a query
        for (int i = 0; i < job.queries; ++i) {
            if constexpr (whole_numbers) {
                alignas(64) float padded[kMaxHead];
                for (int d = 0; d < dim; ++d) padded[d] = d < job.dim ? job.q[i][d] : 0.0f;
                split_query<type>(padded, dim, query[i]);
            } else
                for (int d = 0; d < dim; ++d) {
                    if constexpr (kPairs<type>)
                        query[i][d] = static_cast<uint16_t>(bf16_in_float(job.q[i][d]) >> 16);
                    else if constexpr (type == KVType::BF16)
                        query[i][d] = bits_to_float(bf16_in_float(job.q[i][d]));
                    else
                        query[i][d] = job.q[i][d];
                }
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

    // Scores of queries i, ... and key tiles k, ... of a block.
    template <class Queries, class Tiles>
    void tile(Queries queries, Tiles tiles, int i, const uint8_t* keys, int k, Fetch& fetch, float* to) {
        if constexpr (whole_numbers)
            score_integers<type>(queries, tiles, query + i, keys, k, dim, fetch, to);
        else
            score_tile<type>(queries, tiles, query + i, keys + k * key_tile_bytes<type>(dim), dim, fetch, to);
    }

    // Scores of the block's slots; those of a tree's query go on to the order of positions.
    void score(const uint8_t* block, int tiles, Fetch& fetch) {
        const uint8_t* keys = block + job.keys;
        for (int k = 0; k < tiles; k += kVectors)
            with_range<kVectors>(tiles - k < kVectors ? tiles - k : kVectors, [&](auto some) {
                in_tiles<most>(job.queries, [&](auto pack, int i) { tile(pack, some, i, keys, k, fetch, scores[i] + kSub * k); });
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
                    float lanes[kSub];
                    tile(Range<1>{}, Range<1>{}, i, at.block + job.keys, at.slot / kSub, none, lanes);
                    scores[i][p] = lanes[at.slot % kSub];
                }
            }
        }
    }

    // Scores, capped where the model does that -> their peak, weights relative to it, and their sum; the unseen weigh nothing. One step for all queries, then the next: each is a chain that leaves most of the machine idle.
    void weigh() {
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
        }
    }

    // Query i's weights, times the scales of a group of the values' dimensions, as integers in the order of slots.
    void split_weights(int i, int group, const uint8_t* block) {
        SplitWeights& to = weights[i][group];
        const float* s = scores[i];
        alignas(64) float scaled[kBlock]{};
        const int shared = own[i] < end[i] ? own[i] : end[i];
        for (int p = 0; p < shared; p += 16)
            store(scaled + p, mul(load(s + p), load_scales<type>(scales_of<type>(block + job.values, value_dim, group, p))));
        for (int p = 0; p < begin[i]; ++p) scaled[p] = 0.0f;
        for (int p = shared; p < round_up(shared, 16); ++p) scaled[p] = 0.0f;
        for (int p = shared > begin[i] ? shared : begin[i]; p < end[i]; ++p) {
            const Place at = place(i, p);
            scaled[p] = times(s[p], scale_at<type>(at.block + job.values, value_dim, group, at.slot));
        }
        int32_t sums_of_bytes[2];
        to.scale = split(scaled, kBlock, to.part[0], to.part[1], sums_of_bytes);
        for (int l = 0; l < 2; ++l) to.start[l] = -excess<type>() * sums_of_bytes[l];
        if (shared == end[i]) return;
        std::memcpy(to.apart, to.part, sizeof to.part);
        for (int l = 0; l < 2; ++l) std::memset(to.part[l] + shared, 0, static_cast<size_t>(kBlock - shared));
        for (int p = shared > begin[i] ? shared : begin[i]; p < end[i]; ++p)
            if (const Place at = place(i, p); at.block == block)
                for (int l = 0; l < 2; ++l) to.part[l][at.slot] = to.apart[l][p];
    }

    // As value_tile, from integers: dimensions d, ... are units d / 16, ... of 16 slots each.
    template <int... i, int... c>
    void integer_tile(Pack<i...> queries, Pack<c...> vectors, int first, int d, const uint8_t* block, Fetch& fetching) {
        constexpr int count = static_cast<int>(sizeof...(c));
        int high = 0;
        ((high = sees(first + i) && end[first + i] > high ? end[first + i] : high), ...);
        ((high = own[first + i] < end[first + i] ? kBlock : high), ...);
        Fetch fetch = fetching;
        const int unit = d / 16;
        const auto of = [&](int q, int v) __attribute__((always_inline)) -> const SplitWeights& {
            return weights[first + q][type == KVType::I4 ? (unit + v) / 2 : 0];
        };
        const auto begin_at = [&](int q) __attribute__((always_inline)) {
            return IntegerSums<count>{{{set1_i(of(q, c).start[0])...}, {set1_i(of(q, c).start[1])...}}};
        };
        const auto from = [&](const uint8_t* slots) {
            return [=](int v, int t) __attribute__((always_inline)) { return load_unit<type>(slots, unit + v, t); };
        };
        IntegerSums<count> acc[] = {begin_at(i)...};
        for (int p = 0; p < high; p += 16) {
            fetch.step();
            add_products<type>(queries, vectors, acc, from(block + job.values + p * row),
                [&](int q, int l, int v) __attribute__((always_inline)) { return of(q, v).part[l] + p; });
        }
        // By value: sums whose address is taken are stored after each product.
        const auto elsewhere = [&](IntegerSums<count> sums, int q) {
            for (int p = own[first + q] > begin[first + q] ? own[first + q] : begin[first + q]; p < end[first + q]; ++p) {
                const Place at = place(first + q, p);
                if (at.block == block) continue;
                uint8_t alone[2][count][16]{};
                for (int l = 0; l < 2; ++l)
                    for (int v = 0; v < count; ++v) alone[l][v][at.slot % 16] = of(q, v).apart[l][p];
                IntegerSums<count> one[] = {sums};
                add_products<type>(Range<1>{}, vectors, one, from(at.block + job.values + at.slot / 16 * 16 * row),
                    [&](int, int l, int v) { return alone[l][v]; });
                sums = one[0];
            }
            return sums;
        };
        ((acc[i] = own[first + i] < end[first + i] ? elsewhere(acc[i], i) : acc[i]), ...);
        fetching = fetch;
        const auto put = [&](const IntegerSums<count>& sums, int q) {
            if (sees(first + q)) (place_sums(first + q, d + 16 * c, mul(joined(sums, c), set1(of(q, c).scale))), ...);
        };
        (put(acc[i], i), ...);
    }

    // 16 dimensions of a block's sums: merged with those before it, or left for `merge_parts`.
    void place_sums(int q, int d, F block) const {
        if (whole)
            merged.apply(q, block, sums[q] + d);
        else
            store(sums[q] + d, block);
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
            if (sees(q)) (place_sums(q, d + 16 * c, block.of[c]), ...);
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
        const int tiles = (job.queries + most - 1) / most, passes = value_dim / kTileDims + value_dim % kTileDims / 16;
        const int steps = tiles * (whole_numbers ? dim / 16 + passes * high / 16 : dim / 2 + passes * high) + 1,
                  bytes = static_cast<int>(part_bytes(type, dim) + part_bytes(type, value_dim));
        Fetch fetch{next, next + bytes, (bytes / 64 + steps - 1) / steps};
        score(job.blocks[index], (high + kSub - 1) / kSub, fetch);
        weigh();
        if constexpr (whole_numbers)
            for (int i = 0; i < job.queries; ++i)
                for (int g = 0; g < groups(type, value_dim) && sees(i); ++g) split_weights(i, g, job.blocks[index]);
        if (whole) merged.add(peaks, totals);
        in_tiles<most>(job.queries, [&](auto pack, int i) {
            const auto tile = [&](auto vectors, int d) {
                if constexpr (whole_numbers)
                    integer_tile(pack, vectors, i, d, job.blocks[index], fetch);
                else
                    value_tile(pack, vectors, i, d, values, fetch);
            };
            int d = 0;
            for (; d + kTileDims <= value_dim; d += kTileDims) tile(Range<kVectors>{}, d);
            for (; d < value_dim; d += 16) tile(Range<1>{}, d);
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
    else if (job.type == KVType::I4)
        Attention<KVType::I4>(job).run();
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
