// One forward: one parallel region a chunk of tokens.
//
// Threads split tokens, heads or output rows, never a sum. Between two phases that hand data from thread to thread
// stands a barrier; a thread that is dismissed there leaves at once (see pool.h).
// Long because a forward is one function, cut at its barriers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "model/model.h"
#include "weights/pack.h"

namespace outpace {

class Model::Run {
public:
    Run(Model& model, Pool& pool, Result& result, const BatchView& batch, int first, int count)
        : m_(model), c_(model.config_), k_(model.kernels_), s_(model.scratch_), pool_(pool), result_(result), batch_(batch),
          first_(first), n_(count), solo_(count <= 2 && pool.team() > 1) {
        for (int i = first; i < first + count; ++i)
            if (model.tokens_[static_cast<size_t>(i)].wanted >= 0) wanted_.push_back(i - first);
    }

    void thread(Seat& me) {
        clock(me, kPhases);
        for (int l = 0; l < batch_.layers; ++l)
            if (!layer(me, l)) return;
        head(me);
    }

    void settle(int threads);  // on the caller's thread, after the region; how many ended it

private:
    // Narrow forwards: every thread computes norms and encodings for all tokens in its own buffers, which is cheaper than
    // a barrier. The numbers are the same.
    int mine(const Seat& me) const { return solo_ ? me.id : 0; }
    Part tokens(const Seat& me) const { return solo_ ? Part{0, n_} : me.of(n_); }
    bool meet(Seat& me) { return pool_.meet(me); }
    float* x(const Seat& me, int t) const { return s_.x[static_cast<size_t>(mine(me))].get() + static_cast<size_t>(t) * m_.hidden_stride_; }
    const Token& token(int t) const { return m_.tokens_[static_cast<size_t>(first_ + t)]; }

    void clock(const Seat& me, int phase) {
        if (me.id != 0 || !m_.timing_) return;
        const auto now = std::chrono::steady_clock::now();
        if (phase < kPhases) m_.seconds_[static_cast<size_t>(phase)] += std::chrono::duration<double>(now - since_).count();
        since_ = now;
    }

    // x [hidden] -> normed and encoded for matrices `ms`.
    void encode_normed(const Seat& me, int t, int n, int at, const std::vector<float>& norm, std::initializer_list<const Matrix*> ms) {
        float* line = s_.line[static_cast<size_t>(me.id)].get();
        k_.rmsnorm(x(me, t), norm.data(), c_.eps, c_.hidden, line);
        std::fill(line + c_.hidden, line + m_.hidden_stride_, 0.0f);
        unsigned done = 0;
        for (const Matrix* m : ms) {
            const unsigned bit = 1u << static_cast<unsigned>(m->acts());
            if (done & bit) continue;
            done |= bit;
            k_.encode(m->acts(), line, 0, m->groups, s_.in[static_cast<size_t>(mine(me))].get(m->acts()), n, at);
        }
    }

    // x += y, y normed first where the model has such a norm.
    void add_back(const Seat& me, int t, const std::vector<float>& norm, const std::vector<float>& bias, int stride) {
        const float* y = s_.y.get() + static_cast<size_t>(t) * stride;
        float* line = s_.line[static_cast<size_t>(me.id)].get();
        if (!bias.empty()) {
            std::memcpy(line, y, static_cast<size_t>(c_.hidden) * 4);
            k_.add(line, bias.data(), c_.hidden);
            y = line;
        }
        if (!norm.empty()) {
            k_.rmsnorm(y, norm.data(), c_.eps, c_.hidden, line);
            y = line;
        }
        k_.add(x(me, t), y, c_.hidden);
    }

    void tap(const Seat& me, int t, int layer) {
        if (batch_.taps.empty() || (solo_ && me.rank != 0)) return;
        const int32_t place = result_.tap_place[static_cast<size_t>(first_ + t)];
        for (size_t i = 0; i < batch_.taps.size() && place >= 0; ++i)
            if (batch_.taps[i] == layer)
                std::memcpy(result_.taps.get() + (static_cast<size_t>(place) * batch_.taps.size() + i) * c_.hidden,
                            x(me, t), static_cast<size_t>(c_.hidden) * 4);
    }

    // The hidden state that enters layer `l`: an embedding (and the batch's features), or what layer l - 1 made.
    void enter(const Seat& me, int t, int l) {
        if (l == 0) {
            float* at = x(me, t);
            unpack_row(m_.embedding_, token(t).id, at);
            if (c_.embedding_scale != 1.0f)
                for (int i = 0; i < c_.hidden; ++i) at[i] *= c_.embedding_scale;
            if (batch_.features)
                k_.add(at, batch_.features + static_cast<size_t>(first_ + t) * static_cast<size_t>(c_.hidden), c_.hidden);
            return;
        }
        const Layer& before = m_.layers_[static_cast<size_t>(l - 1)];
        add_back(me, t, before.post_ffn_norm, {}, before.down.out_padded());
        tap(me, t, l - 1);
    }

    // This thread's share of several products over the same inputs.
    struct Product {
        const Matrix* m;
        float* y;
    };
    void products(const Seat& me, std::initializer_list<Product> list) {
        int total = 0;
        for (const Product& p : list) total += p.m->blocks;
        Part part = me.of(total);
        for (const Product& p : list) {
            const int begin = std::max(part.begin, 0), end = std::min(part.end, p.m->blocks);
            if (begin < end)
                k_.matmul(*p.m, s_.in[static_cast<size_t>(mine(me))].get(p.m->acts()), n_, begin, end, p.y, p.m->out_padded());
            part.begin -= p.m->blocks;
            part.end -= p.m->blocks;
        }
    }

    bool layer(Seat& me, int index);
    const uint8_t* first_keys(int job, int layer) const;
    void rope(const Seat& me, const Layer& l, int index);
    bool attention(Seat& me, const Layer& l, int index);
    void gate_up(const Seat& me, const Layer& l);
    void head(Seat& me);

    Model& m_;
    const Config& c_;
    const Kernels& k_;
    Scratch& s_;
    Pool& pool_;
    Result& result_;
    const BatchView& batch_;
    const int first_, n_;
    const bool solo_;
    std::vector<int> wanted_;
    std::chrono::steady_clock::time_point since_;
};

bool Model::Run::layer(Seat& me, int index) {
    const Layer& l = m_.layers_[static_cast<size_t>(index)];
    Part part = tokens(me);
    for (int t = part.begin; t < part.end; ++t) {
        enter(me, t, index);
        encode_normed(me, t, n_, t, l.attn_norm, {&l.q, &l.k, &l.v});
    }
    if (!solo_ && !meet(me)) return false;
    clock(me, kNorm);

    products(me, {{&l.q, s_.q.get()}, {&l.k, s_.k.get()}, {&l.v, s_.v.get()}});
    if (me.rank < static_cast<int>(m_.jobs_.size())) {  // likely first keys are on their way while it waits and rotates
        const uint8_t* keys = first_keys(me.rank, index);
        for (size_t line = 0; line < m_.kv_.shape().part(); line += 64) __builtin_prefetch(keys + line, 0, 2);
    }
    if (!meet(me)) return false;
    clock(me, kQkv);

    rope(me, l, index);
    if (!meet(me)) return false;
    clock(me, kRope);

    if (!attention(me, l, index) || !meet(me)) return false;
    clock(me, kAttention);

    const Part out = me.of(l.o.blocks);
    k_.matmul(l.o, s_.heads.get(l.o.acts()), n_, out.begin, out.end, s_.y.get(), l.o.out_padded());
    if (!meet(me)) return false;
    clock(me, kOutput);

    part = tokens(me);  // the team may be another one by now
    for (int t = part.begin; t < part.end; ++t) {
        add_back(me, t, l.post_attn_norm, l.o_bias, l.o.out_padded());
        encode_normed(me, t, n_, t, l.ffn_norm, {&l.gate, &l.up});
    }
    if (!solo_ && !meet(me)) return false;
    clock(me, kNorm2);

    gate_up(me, l);
    if (!meet(me)) return false;
    clock(me, kGateUp);

    const Part down = me.of(l.down.blocks);
    k_.matmul(l.down, s_.middle.get(l.down.acts()), n_, down.begin, down.end, s_.y.get(), l.down.out_padded());
    if (!meet(me)) return false;
    clock(me, kDown);
    return true;
}

// Biases, head norms, rotation; queries to `rotated`, keys and values to the cache.
void Model::Run::rope(const Seat& me, const Layer& l, int index) {
    const int d = c_.head_dim, padded = m_.kv_.shape().dim_padded();
    const int heads = c_.heads + 2 * c_.kv_heads;
    const Rope& rope = m_.ropes_[static_cast<size_t>(l.rope)];
    const KVShape& shape = m_.kv_.shape();
    const Part part = me.of(n_ * heads);
    for (int unit = part.begin; unit < part.end; ++unit) {
        const int t = unit / heads, head = unit % heads;
        const Token& tok = token(t);
        uint8_t* block = const_cast<uint8_t*>(tok.blocks[tok.slot / kBlock]);
        const auto ready = [&](float* v, const std::vector<float>& bias, const std::vector<float>& norm, int h, float scale) {
            if (!bias.empty()) k_.add(v, bias.data() + h * d, d);
            if (!norm.empty()) k_.rmsnorm(v, norm.data(), c_.eps, d, v);
            k_.rotate(v, rope.cosines(tok.position), rope.sines(tok.position), d / 2, scale);
        };
        if (head < c_.heads) {
            float* q = s_.rotated.get() + (static_cast<size_t>(t) * c_.heads + head) * padded;
            std::memcpy(q, s_.q.get() + static_cast<size_t>(t) * l.q.out_padded() + head * d, static_cast<size_t>(d) * 4);
            std::fill(q + d, q + padded, 0.0f);
            ready(q, l.q_bias, l.q_norm, head, c_.attention_scale);
        } else if (head < c_.heads + c_.kv_heads) {
            const int h = head - c_.heads;
            float* k = s_.k.get() + static_cast<size_t>(t) * l.k.out_padded() + h * d;
            ready(k, l.k_bias, l.k_norm, h, 1.0f);
            k_.put_key(k, d, padded, shape.f32, block + shape.keys(index, h), tok.slot % kBlock);
        } else {
            const int h = head - c_.heads - c_.kv_heads;
            float* v = s_.v.get() + static_cast<size_t>(t) * l.v.out_padded() + h * d;
            if (!l.v_bias.empty()) k_.add(v, l.v_bias.data() + h * d, d);
            k_.put_value(v, d, padded, shape.f32, block + shape.values(index, h), tok.slot % kBlock);
        }
    }
}

const uint8_t* Model::Run::first_keys(int job, int layer) const {
    const Job& planned = m_.jobs_[static_cast<size_t>(job)];
    const Tile& tile = m_.tiles_[static_cast<size_t>(planned.tile)];
    const Token& any = m_.tokens_[static_cast<size_t>(tile.first)];
    return any.blocks[part_of(tile.blocks, planned.range, tile.ranges).begin] + m_.kv_.shape().keys(layer, planned.kv_head);
}

bool Model::Run::attention(Seat& me, const Layer& l, int index) {
    const int d = c_.head_dim, padded = m_.kv_.shape().dim_padded(), group = c_.heads / c_.kv_heads;
    const bool whole_groups = d % kGroup == 0;
    uint8_t* acts = s_.heads.get(l.o.acts());
    const int used = c_.heads * d / kGroup;  // meaningful with whole groups only
    std::atomic<int>& next = m_.next_job_[static_cast<size_t>(index)];
    AttentionJob job;
    job.dim = d;
    job.dim_padded = padded;
    job.kv_f32 = m_.kv_.shape().f32;
    job.part_stride = padded + 16;
    const int jobs = static_cast<int>(m_.jobs_.size());
    for (int j = next.fetch_add(1, std::memory_order_relaxed), after; j < jobs; j = after) {
        after = next.fetch_add(1, std::memory_order_relaxed);
        job.upcoming = first_keys(after < jobs ? after : j, index);
        const Job& planned = m_.jobs_[static_cast<size_t>(j)];
        const Tile& tile = m_.tiles_[static_cast<size_t>(planned.tile)];
        const Token& any = m_.tokens_[static_cast<size_t>(tile.first)];
        job.queries = tile.tokens * group;
        job.cached = any.cached;
        job.blocks = any.blocks;
        job.keys = m_.kv_.shape().keys(index, planned.kv_head);
        job.values = m_.kv_.shape().values(index, planned.kv_head);
        job.block_begin = part_of(tile.blocks, planned.range, tile.ranges).begin;
        job.block_end = part_of(tile.blocks, planned.range, tile.ranges).end;
        for (int i = 0; i < job.queries; ++i) {
            const int t = tile.first - first_ + i / group, head = planned.kv_head * group + i % group;
            const size_t at = static_cast<size_t>(t) * c_.heads + head;
            const Token& tok = token(t);
            job.q[i] = s_.rotated.get() + at * padded;
            job.out[i] = s_.attended.get() + at * padded;
            job.position[i] = tok.position;
            job.first[i] = l.window > 0 ? std::max(0, tok.position - l.window + 1) : 0;
            job.path[i] = tok.path;
            const size_t own = static_cast<size_t>(i / group * c_.heads + head) * tile.blocks * job.part_stride;
            job.parts[i] = tile.ranges > 1 ? s_.parts.get() + tile.parts + own : nullptr;
        }
        k_.attention(job);
        if (tile.ranges > 1) {
            // Whoever finishes a head's last range merges them. The counter is left at 0 for the next layer.
            std::atomic<int>& finished = s_.finished[static_cast<size_t>(planned.tile * c_.kv_heads + planned.kv_head)];
            if (finished.fetch_add(1, std::memory_order_acq_rel) != tile.ranges - 1) continue;
            finished.store(0, std::memory_order_relaxed);
            k_.merge_parts(job);
        }
        if (!whole_groups) continue;
        for (int i = 0; i < job.queries; ++i) {
            const int t = tile.first - first_ + i / group, head = planned.kv_head * group + i % group;
            k_.encode(l.o.acts(), job.out[i], head * d / kGroup, (head + 1) * d / kGroup, acts, n_, t);
            if (head == c_.heads - 1 && used < l.o.groups) {
                float* line = s_.line[static_cast<size_t>(me.id)].get();
                std::fill(line, line + (l.o.groups - used) * kGroup, 0.0f);
                k_.encode(l.o.acts(), line, used, l.o.groups, acts, n_, t);
            }
        }
    }
    if (whole_groups) return true;
    if (!meet(me)) return false;
    const Part part = me.of(n_);
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    for (int t = part.begin; t < part.end; ++t) {
        for (int head = 0; head < c_.heads; ++head)
            std::memcpy(line + head * d, s_.attended.get() + (static_cast<size_t>(t) * c_.heads + head) * padded,
                        static_cast<size_t>(d) * 4);
        std::fill(line + c_.heads * d, line + l.o.in_padded(), 0.0f);
        k_.encode(l.o.acts(), line, 0, l.o.groups, acts, n_, t);
    }
    return true;
}

void Model::Run::gate_up(const Seat& me, const Layer& l) {
    constexpr int blocks = kGateRows / kRows;
    constexpr int unit = kGroup / kRows;  // row blocks that make one group of the next product's inputs
    const uint8_t* gate_acts = s_.in[static_cast<size_t>(mine(me))].get(l.gate.acts());
    const uint8_t* up_acts = s_.in[static_cast<size_t>(mine(me))].get(l.up.acts());
    uint8_t* middle = s_.middle.get(l.down.acts());
    float* g = s_.pair[static_cast<size_t>(me.id)].get();
    float* u = g + static_cast<size_t>(kGateRows) * n_;
    const Part part = me.of(l.gate.blocks / unit);
    for (int begin = part.begin * unit; begin < part.end * unit; begin += blocks) {
        const int end = std::min(begin + blocks, part.end * unit);
        // The kernels write at row block * 16: shift the origin so that this stretch starts at the buffer's own.
        k_.matmul(l.gate, gate_acts, n_, begin, end, g - begin * kRows, kGateRows);
        k_.matmul(l.up, up_acts, n_, begin, end, u - begin * kRows, kGateRows);
        const int rows = (end - begin) * kRows, group = begin / unit;
        for (int t = 0; t < n_; ++t) {
            float* values = g + t * kGateRows;
            k_.gate(c_.activation, values, u + t * kGateRows, rows, values);
            k_.encode(l.down.acts(), values, group, std::min(group + rows / kGroup, l.down.groups), middle, n_, t);
        }
    }
    if (me.rank == 0 && l.gate.blocks / unit < l.down.groups) {  // inputs that only pad the next product
        float* line = s_.line[0].get();
        const int from = l.gate.blocks / unit;
        std::fill(line, line + (l.down.groups - from) * kGroup, 0.0f);
        for (int t = 0; t < n_; ++t) k_.encode(l.down.acts(), line, from, l.down.groups, middle, n_, t);
    }
}

void Model::Run::head(Seat& me) {
    const int l = batch_.layers, wanted = static_cast<int>(wanted_.size());
    const Part part = tokens(me);
    int at = 0;
    for (int t = 0; t < n_; ++t) {
        const bool is_wanted = at < wanted && wanted_[static_cast<size_t>(at)] == t;
        if (t >= part.begin && t < part.end) {
            enter(me, t, l);
            if (is_wanted) encode_normed(me, t, wanted, at, m_.final_norm_, {&m_.head_});
        }
        at += is_wanted;
    }
    if (!solo_ && !meet(me)) return;
    if (wanted > 0) {
        const Matrix& head = m_.head_;
        const Part rows = me.of(head.blocks);
        const int first = token(wanted_[0]).wanted;
        float* y = result_.logits_->get() + static_cast<size_t>(first) * static_cast<size_t>(result_.stride_);
        k_.matmul(head, s_.in[static_cast<size_t>(mine(me))].get(head.acts()), wanted, rows.begin, rows.end, y, result_.stride_);
        const int begin = rows.begin * kRows, end = std::min(rows.end * kRows, c_.vocab);
        for (int i = 0; i < wanted; ++i) {
            Best best{-INFINITY, 0, false};
            if (begin < end) {
                best = k_.argmax(y + static_cast<size_t>(i) * static_cast<size_t>(result_.stride_) + begin, end - begin);
                best.index += begin;
            }
            s_.bests[static_cast<size_t>(me.rank) * kChunk + static_cast<size_t>(i)] = best;
        }
    }
    clock(me, kHead);
}

void Model::Run::settle(int threads) {
    for (size_t i = 0; i < wanted_.size(); ++i) {
        Best best = s_.bests[i];
        for (int rank = 1; rank < threads; ++rank) {
            const Best& other = s_.bests[static_cast<size_t>(rank) * kChunk + i];
            best.nan = best.nan || other.nan;
            if (other.value > best.value) {  // threads hold ascending rows, so ties stay with the lower id
                best.value = other.value;
                best.index = other.index;
            }
        }
        result_.best[static_cast<size_t>(token(wanted_[i]).wanted)] = best;
    }
}

std::unique_ptr<Result> Model::forward(const BatchView& batch) {
    auto result = std::make_unique<Result>();
    if (batch.tokens == 0) throw std::invalid_argument("malformed batch: it has no tokens");
    struct Settled {
        KV& kv;
        ~Settled() { kv.settle(); }
    } const settled{kv_};
    prepare(batch);
    Pool& pool = runtime_->pool();
    result->kernels = &kernels_;
    result->runtime = runtime_;
    result->vocab = config_.vocab;
    result->hidden = config_.hidden;
    result->tokens = batch.tokens;
    result->tap_count = static_cast<int>(batch.taps.size());
    for (int b = 0; b < batch.rows && !batch.taps.empty(); ++b)
        for (int i = batch.starts[b]; i < batch.starts[b + 1]; ++i)
            result->tap_place.push_back(batch.tapped && !batch.tapped[b] ? -1 : result->tap_tokens++);
    result->taps.reset(new float[static_cast<size_t>(result->tap_tokens) * batch.taps.size() * static_cast<size_t>(config_.hidden)]);
    result->wanted.assign(batch.wanted, batch.wanted + batch.wanted_count);
    result->best.resize(static_cast<size_t>(batch.wanted_count));
    result->stride_ = head_.out_padded();
    result->logits_ = logits_pool_->take(static_cast<size_t>(batch.wanted_count) * static_cast<size_t>(result->stride_));
    for (int first = 0; first < batch.tokens; first += kChunk) {
        const int count = std::min(kChunk, batch.tokens - first);
        plan_jobs(first, count, pool.team());
        Run run(*this, pool, *result, batch, first, count);
        unsigned kind = 0;  // widths up to 1, 2, 4 ...
        while (1 << kind < count) ++kind;
        result->threads = pool.run([&run](Seat& me) { run.thread(me); }, kind, static_cast<double>(weights_->bytes()));
        run.settle(result->threads);
    }
    for (int b = 0; b < batch.rows; ++b) kv_.lengthen(batch.row[batch.starts[b]], batch.starts[b + 1] - batch.starts[b]);
    return result;
}

}  // namespace outpace
