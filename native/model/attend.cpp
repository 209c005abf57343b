// Attention within a forward: rotation, the cache's new keys and values, and the jobs that threads take in turn.
#include <algorithm>
#include <cstring>

#include "model/run.h"
#include "runtime/denormals.h"

namespace outpace {

// Biases, head norms, rotation; queries to `rotated`, keys and values to the cache. `from`: the first head, queries' first.
void Model::Run::rope(const Seat& me, const Layer& l, int index, int from) {
    const int d = l.head_dim, padded = round_up(d, 16);
    const int keys = l.shares < 0 ? l.kv_heads : 0, values = l.v.data ? keys : 0;
    const int heads = c_.heads + keys + values - from;
    const Rope* rope = l.rope < 0 ? nullptr : &m_.ropes_[static_cast<size_t>(l.rope)];
    const KVShape& shape = m_.keys();
    const int place = m_.places_[static_cast<size_t>(index)];
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    const float* normed = nullptr;  // which queries or keys `line` has, under a norm over all of their heads
    const Part part = me.of(n_ * heads);
    for (int unit = part.begin; unit < part.end; ++unit) {
        const int t = unit / heads, head = from + unit % heads;
        const Plan::Token& tok = token(t);
        uint8_t* block = const_cast<uint8_t*>(m_.plan_.blocks(tok, shape[place].pool)[tok.slot / kBlock]);
        const auto of_all = [&](const std::vector<float>& norm) { return static_cast<int>(norm.size()) > d; };
        // A token's queries or keys, all heads, as products left them or normed.
        const auto vectors = [&](float* v, const std::vector<float>& bias, const std::vector<float>& norm) {
            if (!of_all(norm)) return v;
            if (normed != v) {
                const int n = static_cast<int>(norm.size());
                std::memcpy(line, v, norm.size() * 4);
                if (!bias.empty()) k_.add(line, bias.data(), n);
                k_.rmsnorm(line, norm.data(), c_.eps, n, line);
                normed = v;
            }
            return line;
        };
        const auto ready = [&](float* v, const std::vector<float>& bias, const std::vector<float>& norm, int h, float scale) {
            if (!of_all(norm)) {
                if (!bias.empty()) k_.add(v, bias.data() + h * d, d);
                if (!norm.empty()) k_.rmsnorm(v, norm.data(), c_.eps, d, v);
            }
            const int half = rope ? static_cast<int>(rope->half()) : 0;
            if (rope) k_.rotate(v, rope->cosines(tok.turn), rope->sines(tok.turn), half, scale);
            for (int i = 2 * half; i < d; ++i) v[i] = times(v[i], scale);
        };
        const auto put_value = [&](float* v, int h) {
            if (!l.v_bias.empty()) k_.add(v, l.v_bias.data() + h * d, d);
            if (!l.v_norm.empty()) k_.rmsnorm(v, l.v_norm.data(), c_.eps, d, v);
            k_.put_value(v, d, padded, shape.type, block + shape.values(place, h), tok.slot % kBlock);
        };
        if (head < c_.heads) {
            float* q = s_.rotated.get() + (static_cast<size_t>(t) * c_.heads + head) * padded;
            const float* all = vectors(s_.q.get() + static_cast<size_t>(t) * l.q.out_padded(), l.q_bias, l.q_norm);
            std::memcpy(q, all + head * (l.gated ? 2 * d : d), static_cast<size_t>(d) * 4);
            std::fill(q + d, q + padded, 0.0f);
            ready(q, l.q_bias, l.q_norm, head, rope ? times(c_.attention_scale, rope->growth(tok.turn)) : c_.attention_scale);
        } else if (head < c_.heads + keys) {
            const int h = head - c_.heads;
            if (!l.v.data) {
                std::memcpy(line, s_.k.get() + static_cast<size_t>(t) * l.k.out_padded() + h * d, static_cast<size_t>(d) * 4);
                put_value(line, h);
            }
            float* k = vectors(s_.k.get() + static_cast<size_t>(t) * l.k.out_padded(), l.k_bias, l.k_norm) + h * d;
            ready(k, l.k_bias, l.k_norm, h, 1.0f);
            k_.put_key(k, d, padded, shape.type, block + shape.keys(place, h), tok.slot % kBlock);
        } else {
            const int h = head - c_.heads - keys;
            put_value(s_.v.get() + static_cast<size_t>(t) * l.v.out_padded() + h * d, h);
        }
    }
}

const uint8_t* Model::Run::first_keys(int job, int layer) const {
    const Split& split = m_.split_of(layer);
    const Job& planned = split.jobs[static_cast<size_t>(job)];
    const Tile& tile = split.tiles[static_cast<size_t>(planned.tile)];
    const Plan::Token& any = m_.plan_[tile.first];
    const KVShape& shape = m_.keys();
    const int place = m_.places_[static_cast<size_t>(layer)], pool = shape[place].pool;
    int first = part_of(tile.blocks, planned.range, tile.ranges).begin;
    if (pool == kWindowed) first = std::max(first, (any.cached - shape.window + 1) / kBlock);  // those before may be given back
    return m_.plan_.blocks(any, pool)[first] + shape.keys(place, split.kv_head(planned.group));
}

bool Model::Run::attention(Seat& me, const Layer& l, int index) {
    const Split& split = m_.split_of(index);
    const int d = l.head_dim, padded = round_up(d, 16), value_padded = round_up(l.value_dim(), 16);
    const int group = c_.heads / split.groups;
    const bool whole_groups = d % kGroup == 0;
    const int place = m_.places_[static_cast<size_t>(index)];
    uint8_t* acts = s_.heads.get(l.o.acts());
    const int used = c_.heads * d / kGroup;  // meaningful with whole groups only
    std::atomic<int>& next = m_.next_job_[static_cast<size_t>(index)];
    AttentionJob job;
    job.dim = d;
    job.dim_padded = padded;
    job.type = m_.keys().type;
    job.value_padded = value_padded;
    job.part_stride = split.record;
    job.sinks = !l.sinks.empty();
    job.cap = c_.score_cap;
    const int jobs = static_cast<int>(split.jobs.size());
    for (int j = next.fetch_add(1, std::memory_order_relaxed), after; j < jobs; j = after) {
        after = next.fetch_add(1, std::memory_order_relaxed);
        job.upcoming = first_keys(after < jobs ? after : j, index);
        const Job& planned = split.jobs[static_cast<size_t>(j)];
        const Tile& tile = split.tiles[static_cast<size_t>(planned.tile)];
        const Plan::Token& any = m_.plan_[tile.first];
        job.queries = tile.tokens * group;
        job.cached = any.cached;
        job.blocks = m_.plan_.blocks(any, m_.keys()[place].pool);
        job.keys = m_.keys().keys(place, split.kv_head(planned.group));
        job.values = m_.keys().values(place, split.kv_head(planned.group));
        job.block_begin = part_of(tile.blocks, planned.range, tile.ranges).begin;
        job.block_end = part_of(tile.blocks, planned.range, tile.ranges).end;
        for (int i = 0; i < job.queries; ++i) {
            const int t = tile.first - first_ + i / group, head = planned.group * group + i % group;
            const size_t at = static_cast<size_t>(t) * c_.heads + head;
            const Plan::Token& tok = token(t);
            job.q[i] = s_.rotated.get() + at * padded;
            job.out[i] = s_.attended.get() + at * value_padded;
            job.position[i] = l.causal ? tok.slot : tok.position;
            if (job.sinks) job.sink[i] = l.sinks[static_cast<size_t>(head)];
            // A tree's node stands before its slot; a slot of a block that is seen both ways before the block's end.
            const int last = l.anchored ? tok.cached - 1 : std::min(tok.slot, tok.position);
            job.first[i] = l.window > 0 ? std::max(0, last - l.window + 1) : 0;
            job.path[i] = m_.plan_.path(tok);
            const size_t own = static_cast<size_t>(i / group * c_.heads + head) * tile.blocks * job.part_stride;
            job.parts[i] = tile.ranges > 1 ? s_.parts.get() + tile.parts + own : nullptr;
        }
        k_.attention(job);
        if (tile.ranges > 1) {
            // Whoever finishes a head's last range merges them. The counter is left at 0 for the next layer.
            std::atomic<int>& finished = s_.finished[static_cast<size_t>(planned.tile * split.groups + planned.group)];
            if (finished.fetch_add(1, std::memory_order_acq_rel) != tile.ranges - 1) continue;
            finished.store(0, std::memory_order_relaxed);
            k_.merge_parts(job);
        }
        if (l.latent.rank > 0) {
            const Matrix& up = l.latent.v_up;
            float* line = s_.line[static_cast<size_t>(me.id)].get();
            std::fill(line + up.cols, line + up.in_padded(), 0.0f);
            for (int i = 0; i < job.queries; ++i) {
                const int t = tile.first - first_ + i / group, head = planned.group * group + i % group;
                std::memcpy(line, job.out[i], static_cast<size_t>(up.cols) * 4);
                k_.encode(up.acts(), line, head * up.groups, (head + 1) * up.groups, s_.latents.get(up.acts()), n_, t);
            }
            continue;
        }
        for (int i = 0; i < job.queries && l.gated; ++i) {
            const int t = tile.first - first_ + i / group, head = planned.group * group + i % group;
            k_.gate(Activation::Sigmoid, product_in(s_.q, t, l.q) + head * 2 * d + d, job.out[i], d, job.out[i]);
        }
        if (!whole_groups) continue;
        for (int i = 0; i < job.queries; ++i) {
            const int t = tile.first - first_ + i / group, head = planned.group * group + i % group;
            k_.encode(l.o.acts(), job.out[i], head * d / kGroup, (head + 1) * d / kGroup, acts, n_, t);
            if (head == c_.heads - 1 && used < l.o.groups) {
                float* line = s_.line[static_cast<size_t>(me.id)].get();
                std::fill(line, line + (l.o.groups - used) * kGroup, 0.0f);
                k_.encode(l.o.acts(), line, used, l.o.groups, acts, n_, t);
            }
        }
    }
    if (whole_groups || l.latent.rank > 0) return true;
    if (!meet(me)) return false;
    const Part part = me.of(n_);
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    for (int t = part.begin; t < part.end; ++t) {
        for (int head = 0; head < c_.heads; ++head)
            std::memcpy(
                line + head * d, s_.attended.get() + (static_cast<size_t>(t) * c_.heads + head) * value_padded, static_cast<size_t>(d) * 4);
        std::fill(line + c_.heads * d, line + l.o.in_padded(), 0.0f);
        k_.encode(l.o.acts(), line, 0, l.o.groups, acts, n_, t);
    }
    return true;
}

}  // namespace outpace
