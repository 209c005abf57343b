// One forward: check the batch, lay out what each token sees, then one parallel region a chunk of tokens.
//
// Threads split tokens, heads or output rows, never a sum. Between two phases that hand data from thread to thread
// stands a barrier.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "model.h"
#include "pack.h"

namespace outpace {

void Model::prepare(const BatchView& batch) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed batch: " + what); };
    const int n = batch.tokens;
    if (batch.layers < 1 || batch.layers > static_cast<int>(layers_.size())) wrong("layers is out of range");
    for (const int tap : batch.taps)
        if (tap < 0 || tap >= batch.layers) wrong("tap " + std::to_string(tap) + " is not a layer that runs");
    if (batch.starts[0] != 0 || batch.starts[batch.rows] != n) wrong("starts does not span the tokens");
    std::vector<int> seen;
    size_t path_length = 0;
    for (int b = 0; b < batch.rows; ++b) {
        const int begin = batch.starts[b], end = batch.starts[b + 1];
        if (begin < 0 || end <= begin || end > n) wrong("starts must ascend");
        const int row = batch.row[begin], cached = kv_.length(row);
        seen.push_back(row);
        if (end - begin > kv_.capacity(row) - cached)
            wrong("row " + std::to_string(row) + " has " + std::to_string(cached) + " of " +
                  std::to_string(kv_.capacity(row)) + " positions in use, " + std::to_string(end - begin) + " more do not fit");
        for (int i = begin; i < end; ++i) {
            const int parent = batch.parent[i], own = i - begin;
            if (batch.row[i] != row) wrong("a row's tokens must stand together");
            if (batch.token[i] < 0 || batch.token[i] >= config_.vocab)
                wrong("token " + std::to_string(batch.token[i]) + " is not in the vocabulary");
            if (parent < -1 || parent >= own) wrong("a parent must come before its child");
            const int expected = parent < 0 ? cached : batch.position[begin + parent] + 1;
            if (batch.position[i] != expected)
                wrong("position " + std::to_string(batch.position[i]) + " should be " + std::to_string(expected));
            if (expected >= config_.max_length)
                wrong("position " + std::to_string(expected) + " is beyond the model's " +
                      std::to_string(config_.max_length));
            // In a chain slots are positions and no path is needed. expected - cached + 1 slots otherwise.
            if (expected != cached + own) path_length += static_cast<size_t>(expected - cached) + 1;
        }
    }
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) wrong("a row appears twice");
    for (int i = 0; i < batch.wanted_count; ++i)
        if (batch.wanted[i] < 0 || batch.wanted[i] >= n || (i > 0 && batch.wanted[i] <= batch.wanted[i - 1]))
            wrong("wanted must ascend within the tokens");

    tokens_.clear();
    paths_.clear();
    paths_.reserve(path_length);  // no reallocation below: tokens keep pointers
    int last = 0, wanted = 0;
    for (int b = 0; b < batch.rows; ++b) {
        const int begin = batch.starts[b], end = batch.starts[b + 1];
        const int row = batch.row[begin], cached = kv_.length(row);
        const uint8_t* const* blocks = kv_.grow(row, end - begin);
        for (int i = begin; i < end; ++i) {
            Token token{batch.token[i], row, batch.position[i], cached + i - begin, cached, nullptr, blocks, -1};
            // position == slot holds for a node exactly when its ancestors are the nodes before it, one a depth.
            if (token.position != token.slot) {
                const size_t start = paths_.size();
                const int depth = token.position - cached;
                paths_.resize(start + static_cast<size_t>(depth) + 1);
                int node = i - begin;
                for (int d = depth; d >= 0; --d, node = batch.parent[begin + node]) paths_[start + static_cast<size_t>(d)] = cached + node;
                token.path = paths_.data() + start;
            }
            if (wanted < batch.wanted_count && batch.wanted[wanted] == i) token.wanted = wanted++;
            last = std::max(last, token.position);
            tokens_.push_back(token);
        }
    }
    for (Rope& rope : ropes_) rope.cover(last + 1);
}

// Tiles of tokens of one row, by KV head: as wide as leaves work for every thread, since a tile reads its keys once;
// where even single tokens do not, by ranges of blocks too.
void Model::plan_jobs(int first, int count) {
    jobs_.clear();
    const int group = config_.heads / config_.kv_heads;
    int tile = std::max(1, std::min(8, kMaxQueries / group));
    while (tile > 1 && (count + tile - 1) / tile * config_.kv_heads < 2 * pool_.size()) tile /= 2;
    std::vector<Tile>& tiles = tiles_;
    tiles.clear();
    for (int t = first; t < first + count;) {
        int end = t + 1, blocks = tokens_[static_cast<size_t>(t)].position / kBlock + 1;
        for (; end < first + count && end - t < tile && tokens_[static_cast<size_t>(end)].row == tokens_[static_cast<size_t>(t)].row; ++end)
            blocks = std::max(blocks, tokens_[static_cast<size_t>(end)].position / kBlock + 1);
        tiles.push_back({t, end - t, blocks, 1, 0});
        t = end;
    }
    const int base = static_cast<int>(tiles.size()) * config_.kv_heads;
    const int missing = base >= 2 * pool_.size() ? 1 : 6 * pool_.size() / base;  // taken as threads become free
    size_t parts = 0;
    const size_t record = static_cast<size_t>(kv_.shape().dim_padded()) + 16;
    for (size_t i = 0; i < tiles.size(); ++i) {
        Tile& t = tiles[i];
        if (pool_.size() > 1 && missing > 1) t.ranges = std::min(t.blocks, missing);
        if (t.ranges > 1) {
            t.parts = parts;
            parts += static_cast<size_t>(t.tokens) * static_cast<size_t>(config_.heads) * static_cast<size_t>(t.blocks) * record;
        }
        for (int head = 0; head < config_.kv_heads; ++head)
            for (int r = 0; r < t.ranges; ++r) jobs_.push_back({static_cast<int>(i), head, r});
    }
    if (parts_.size() < parts) parts_ = Buffer<float>(parts + parts / 2);
    const size_t counters = tiles.size() * static_cast<size_t>(config_.kv_heads);
    if (finished_.size() < counters) finished_ = std::vector<std::atomic<int>>(counters);
    for (std::atomic<int>& next : next_job_) next.store(pool_.size(), std::memory_order_relaxed);
}

class Model::Run {
public:
    Run(Model& model, Result& result, const BatchView& batch, int first, int count)
        : m_(model), c_(model.config_), k_(model.kernels_), s_(model.scratch_), result_(result), batch_(batch),
          first_(first), n_(count), threads_(model.pool_.size()), solo_(count <= 2 && threads_ > 1) {
        for (int i = first; i < first + count; ++i)
            if (model.tokens_[static_cast<size_t>(i)].wanted >= 0) wanted_.push_back(i - first);
    }

    void thread(int id) {
        clock(id, kPhases);
        for (int l = 0; l < batch_.layers; ++l) layer(id, l);
        head(id);
    }

    void settle();  // on the caller's thread, after the region

private:
    // Narrow forwards: every thread computes norms and encodings for all tokens in its own buffers, which is cheaper than
    // a barrier. The numbers are the same.
    int mine(int id) const { return solo_ ? id : 0; }
    Part tokens(int id) const { return solo_ ? Part{0, n_} : part_of(n_, id, threads_); }
    void meet() { m_.pool_.barrier(); }
    float* x(int id, int t) const { return s_.x[static_cast<size_t>(mine(id))].get() + static_cast<size_t>(t) * s_.hidden_stride; }
    const Token& token(int t) const { return m_.tokens_[static_cast<size_t>(first_ + t)]; }

    void clock(int id, int phase) {
        if (id != 0 || !m_.timing_) return;
        const auto now = std::chrono::steady_clock::now();
        if (phase < kPhases) m_.seconds_[static_cast<size_t>(phase)] += std::chrono::duration<double>(now - since_).count();
        since_ = now;
    }

    // x [hidden] -> normed and encoded for matrices `ms`.
    void encode_normed(int id, int t, int n, int at, const std::vector<float>& norm, std::initializer_list<const Matrix*> ms) {
        float* line = s_.line[static_cast<size_t>(id)].get();
        k_.rmsnorm(x(id, t), norm.data(), c_.eps, c_.hidden, line);
        std::fill(line + c_.hidden, line + s_.hidden_stride, 0.0f);
        unsigned done = 0;
        for (const Matrix* m : ms) {
            const unsigned bit = 1u << static_cast<unsigned>(m->acts());
            if (done & bit) continue;
            done |= bit;
            k_.encode(m->acts(), line, 0, m->groups, s_.in[static_cast<size_t>(mine(id))].get(m->acts()), n, at);
        }
    }

    // x += y, y normed first where the model has such a norm.
    void add_back(int id, int t, const std::vector<float>& norm, const std::vector<float>& bias, int stride) {
        const float* y = s_.y.get() + static_cast<size_t>(t) * stride;
        float* line = s_.line[static_cast<size_t>(id)].get();
        if (!bias.empty()) {
            std::memcpy(line, y, static_cast<size_t>(c_.hidden) * 4);
            k_.add(line, bias.data(), c_.hidden);
            y = line;
        }
        if (!norm.empty()) {
            k_.rmsnorm(y, norm.data(), c_.eps, c_.hidden, line);
            y = line;
        }
        k_.add(x(id, t), y, c_.hidden);
    }

    void tap(int id, int t, int layer) {
        if (solo_ && id != 0) return;
        for (size_t i = 0; i < batch_.taps.size(); ++i)
            if (batch_.taps[i] == layer)
                std::memcpy(result_.taps.data() + (static_cast<size_t>(first_ + t) * batch_.taps.size() + i) * c_.hidden,
                            x(id, t), static_cast<size_t>(c_.hidden) * 4);
    }

    // The hidden state that enters layer `l`: an embedding, or what layer l - 1 made.
    void enter(int id, int t, int l) {
        if (l == 0) {
            float* at = x(id, t);
            unpack_row(m_.embedding_, token(t).id, at);
            if (c_.embedding_scale != 1.0f)
                for (int i = 0; i < c_.hidden; ++i) at[i] *= c_.embedding_scale;
            return;
        }
        const Layer& before = m_.layers_[static_cast<size_t>(l - 1)];
        add_back(id, t, before.post_ffn_norm, {}, before.down.out_padded());
        tap(id, t, l - 1);
    }

    // This thread's share of several products over the same inputs.
    struct Product {
        const Matrix* m;
        float* y;
    };
    void products(int id, std::initializer_list<Product> list) {
        int total = 0;
        for (const Product& p : list) total += p.m->blocks;
        Part part = part_of(total, id, threads_);
        for (const Product& p : list) {
            const int begin = std::max(part.begin, 0), end = std::min(part.end, p.m->blocks);
            if (begin < end)
                k_.matmul(*p.m, s_.in[static_cast<size_t>(mine(id))].get(p.m->acts()), n_, begin, end, p.y, p.m->out_padded());
            part.begin -= p.m->blocks;
            part.end -= p.m->blocks;
        }
    }

    void layer(int id, int index);
    const uint8_t* first_keys(int job, int layer) const;
    void rope(int id, const Layer& l, int index);
    void attention(int id, const Layer& l, int index);
    void gate_up(int id, const Layer& l);
    void head(int id);

    Model& m_;
    const Config& c_;
    const Kernels& k_;
    Scratch& s_;
    Result& result_;
    const BatchView& batch_;
    const int first_, n_, threads_;
    const bool solo_;
    std::vector<int> wanted_;
    std::chrono::steady_clock::time_point since_;
};

void Model::Run::layer(int id, int index) {
    const Layer& l = m_.layers_[static_cast<size_t>(index)];
    const Part part = tokens(id);
    for (int t = part.begin; t < part.end; ++t) {
        enter(id, t, index);
        encode_normed(id, t, n_, t, l.attn_norm, {&l.q, &l.k, &l.v});
    }
    if (!solo_) meet();
    clock(id, kNorm);

    products(id, {{&l.q, s_.q.get()}, {&l.k, s_.k.get()}, {&l.v, s_.v.get()}});
    if (id < static_cast<int>(m_.jobs_.size())) {  // this thread's first keys are on their way while it waits and rotates
        const uint8_t* keys = first_keys(id, index);
        for (size_t line = 0; line < m_.kv_.shape().part(); line += 64) __builtin_prefetch(keys + line, 0, 2);
    }
    meet();
    clock(id, kQkv);

    rope(id, l, index);
    meet();
    clock(id, kRope);

    attention(id, l, index);
    meet();
    clock(id, kAttention);

    const Part out = part_of(l.o.blocks, id, threads_);
    k_.matmul(l.o, s_.heads.get(l.o.acts()), n_, out.begin, out.end, s_.y.get(), l.o.out_padded());
    meet();
    clock(id, kOutput);

    for (int t = part.begin; t < part.end; ++t) {
        add_back(id, t, l.post_attn_norm, l.o_bias, l.o.out_padded());
        encode_normed(id, t, n_, t, l.ffn_norm, {&l.gate, &l.up});
    }
    if (!solo_) meet();
    clock(id, kNorm2);

    gate_up(id, l);
    meet();
    clock(id, kGateUp);

    const Part down = part_of(l.down.blocks, id, threads_);
    k_.matmul(l.down, s_.middle.get(l.down.acts()), n_, down.begin, down.end, s_.y.get(), l.down.out_padded());
    meet();
    clock(id, kDown);
}

// Biases, head norms, rotation; queries to `rotated`, keys and values to the cache.
void Model::Run::rope(int id, const Layer& l, int index) {
    const int d = c_.head_dim, padded = m_.kv_.shape().dim_padded();
    const int heads = c_.heads + 2 * c_.kv_heads;
    const Rope& rope = m_.ropes_[static_cast<size_t>(l.rope)];
    const KVShape& shape = m_.kv_.shape();
    const Part part = part_of(n_ * heads, id, threads_);
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

void Model::Run::attention(int id, const Layer& l, int index) {
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
    for (int j = id, after; j < jobs; j = after) {
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
            job.parts[i] = tile.ranges > 1 ? m_.parts_.get() + tile.parts + own : nullptr;
        }
        k_.attention(job);
        if (tile.ranges > 1) {
            // Whoever finishes a head's last range merges them. The counter is left at 0 for the next layer.
            std::atomic<int>& finished = m_.finished_[static_cast<size_t>(planned.tile * c_.kv_heads + planned.kv_head)];
            if (finished.fetch_add(1, std::memory_order_acq_rel) != tile.ranges - 1) continue;
            finished.store(0, std::memory_order_relaxed);
            k_.merge_parts(job);
        }
        if (!whole_groups) continue;
        for (int i = 0; i < job.queries; ++i) {
            const int t = tile.first - first_ + i / group, head = planned.kv_head * group + i % group;
            k_.encode(l.o.acts(), job.out[i], head * d / kGroup, (head + 1) * d / kGroup, acts, n_, t);
            if (head == c_.heads - 1 && used < l.o.groups) {
                float* line = s_.line[static_cast<size_t>(id)].get();
                std::fill(line, line + (l.o.groups - used) * kGroup, 0.0f);
                k_.encode(l.o.acts(), line, used, l.o.groups, acts, n_, t);
            }
        }
    }
    if (whole_groups) return;
    meet();
    const Part part = part_of(n_, id, threads_);
    float* line = s_.line[static_cast<size_t>(id)].get();
    for (int t = part.begin; t < part.end; ++t) {
        for (int head = 0; head < c_.heads; ++head)
            std::memcpy(line + head * d, s_.attended.get() + (static_cast<size_t>(t) * c_.heads + head) * padded,
                        static_cast<size_t>(d) * 4);
        std::fill(line + c_.heads * d, line + l.o.in_padded(), 0.0f);
        k_.encode(l.o.acts(), line, 0, l.o.groups, acts, n_, t);
    }
}

void Model::Run::gate_up(int id, const Layer& l) {
    constexpr int blocks = kGateRows / kRows;
    constexpr int unit = kGroup / kRows;  // row blocks that make one group of the next product's inputs
    const uint8_t* gate_acts = s_.in[static_cast<size_t>(mine(id))].get(l.gate.acts());
    const uint8_t* up_acts = s_.in[static_cast<size_t>(mine(id))].get(l.up.acts());
    uint8_t* middle = s_.middle.get(l.down.acts());
    float* g = s_.pair[static_cast<size_t>(id)].get();
    float* u = g + static_cast<size_t>(kGateRows) * n_;
    const Part part = part_of(l.gate.blocks / unit, id, threads_);
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
    if (id == 0 && l.gate.blocks / unit < l.down.groups) {  // inputs that only pad the next product
        float* line = s_.line[0].get();
        const int from = l.gate.blocks / unit;
        std::fill(line, line + (l.down.groups - from) * kGroup, 0.0f);
        for (int t = 0; t < n_; ++t) k_.encode(l.down.acts(), line, from, l.down.groups, middle, n_, t);
    }
}

void Model::Run::head(int id) {
    const int l = batch_.layers, wanted = static_cast<int>(wanted_.size());
    const Part part = tokens(id);
    int at = 0;
    for (int t = 0; t < n_; ++t) {
        const bool is_wanted = at < wanted && wanted_[static_cast<size_t>(at)] == t;
        if (t >= part.begin && t < part.end) {
            enter(id, t, l);
            if (is_wanted) encode_normed(id, t, wanted, at, m_.final_norm_, {&m_.head_});
        }
        at += is_wanted;
    }
    if (!solo_) meet();
    if (wanted > 0) {
        const Matrix& head = m_.head_;
        const Part rows = part_of(head.blocks, id, threads_);
        const int first = token(wanted_[0]).wanted;
        float* y = result_.logits_->get() + static_cast<size_t>(first) * static_cast<size_t>(result_.stride_);
        k_.matmul(head, s_.in[static_cast<size_t>(mine(id))].get(head.acts()), wanted, rows.begin, rows.end, y, result_.stride_);
        const int begin = rows.begin * kRows, end = std::min(rows.end * kRows, c_.vocab);
        for (int i = 0; i < wanted; ++i) {
            Best best{-INFINITY, 0, false};
            if (begin < end) {
                best = k_.argmax(y + static_cast<size_t>(i) * static_cast<size_t>(result_.stride_) + begin, end - begin);
                best.index += begin;
            }
            m_.bests_[static_cast<size_t>(id) * kChunk + static_cast<size_t>(i)] = best;
        }
    }
    clock(id, kHead);
}

void Model::Run::settle() {
    for (size_t i = 0; i < wanted_.size(); ++i) {
        Best best = m_.bests_[i];
        for (int id = 1; id < threads_; ++id) {
            const Best& other = m_.bests_[static_cast<size_t>(id) * kChunk + i];
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
    prepare(batch);
    result->kernels = &kernels_;
    result->vocab = config_.vocab;
    result->hidden = config_.hidden;
    result->tokens = batch.tokens;
    result->tap_count = static_cast<int>(batch.taps.size());
    result->taps.resize(static_cast<size_t>(batch.tokens) * batch.taps.size() * static_cast<size_t>(config_.hidden));
    result->wanted.assign(batch.wanted, batch.wanted + batch.wanted_count);
    result->best.resize(static_cast<size_t>(batch.wanted_count));
    result->stride_ = head_.out_padded();
    result->logits_ = logits_pool_->take(static_cast<size_t>(batch.wanted_count) * static_cast<size_t>(result->stride_));
    for (int first = 0; first < batch.tokens; first += kChunk) {
        const int count = std::min(kChunk, batch.tokens - first);
        plan_jobs(first, count);
        Run run(*this, *result, batch, first, count);
        pool_.run([&run](int id) { run.thread(id); });
        run.settle();
    }
    for (int b = 0; b < batch.rows; ++b) kv_.lengthen(batch.row[batch.starts[b]], batch.starts[b + 1] - batch.starts[b]);
    return result;
}

}  // namespace outpace
