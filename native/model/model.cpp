#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace outpace {

const char* const kPhaseNames[kPhases] = {"norm",  "qkv",     "rope", "attention", "output",
                                          "norm2", "gate_up", "down", "head"};

void Rope::cover(int positions) {
    if (positions <= covered_) return;
    const int target = std::max(positions, std::min(2 * covered_, covered_ + 4096));
    cos_.reserve(static_cast<size_t>(target) * half());
    sin_.reserve(static_cast<size_t>(target) * half());
    for (int p = covered_; p < target; ++p) {
        for (const float frequency : inverse_) {
            // The angle is rounded to float32 as in the models' training code; its cosine is exact to float32.
            const float angle = static_cast<float>(p) * frequency;
            cos_.push_back(static_cast<float>(std::cos(static_cast<double>(angle))));
            sin_.push_back(static_cast<float>(std::sin(static_cast<double>(angle))));
        }
    }
    covered_ = target;
}

int Result::find(int32_t packed) const {
    const auto at = std::lower_bound(wanted.begin(), wanted.end(), packed);
    if (at == wanted.end() || *at != packed)
        throw std::out_of_range("packed index " + std::to_string(packed) + " was not wanted, so it has no logits");
    return static_cast<int>(at - wanted.begin());
}

namespace {

void fits(const Matrix& m, int rows, int cols, const char* name) {
    if (m.rows != rows || m.cols != cols || !m.data)
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(m.rows) + " x " + std::to_string(m.cols) +
                                    ", expected " + std::to_string(rows) + " x " + std::to_string(cols));
}
void fits(const std::vector<float>& v, int n, bool required, const char* name) {
    if ((required || !v.empty()) && static_cast<int>(v.size()) != n)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(v.size()) + " values, expected " +
                                    std::to_string(n));
}

void check(const Config& c, const std::vector<Layer>& layers, const Matrix& embedding, const Matrix& head,
           const std::vector<float>& final_norm, const std::vector<Rope>& ropes) {
    if (c.vocab <= 0 || c.hidden <= 0 || c.heads <= 0 || c.kv_heads <= 0 || c.heads % c.kv_heads != 0 || c.head_dim <= 0 ||
        c.head_dim % 2 != 0 || c.ffn <= 0 || c.max_length <= 0 || layers.empty() || c.heads / c.kv_heads > kMaxQueries || round_up(c.head_dim, 16) > kMaxHead)
        throw std::invalid_argument("the model's sizes do not fit together");
    fits(embedding, c.vocab, c.hidden, "the embedding");
    fits(head, c.vocab, c.hidden, "the output head");
    fits(final_norm, c.hidden, true, "the final norm");
    const int q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    for (const Layer& l : layers) {
        fits(l.q, q, c.hidden, "a query matrix");
        fits(l.k, kv, c.hidden, "a key matrix");
        fits(l.v, kv, c.hidden, "a value matrix");
        fits(l.o, c.hidden, q, "an attention output matrix");
        fits(l.gate, c.ffn, c.hidden, "a gate matrix");
        fits(l.up, c.ffn, c.hidden, "an up matrix");
        fits(l.down, c.hidden, c.ffn, "a down matrix");
        fits(l.attn_norm, c.hidden, true, "an attention norm");
        fits(l.ffn_norm, c.hidden, true, "a feed-forward norm");
        fits(l.post_attn_norm, c.hidden, false, "a post-attention norm");
        fits(l.post_ffn_norm, c.hidden, false, "a post-feed-forward norm");
        fits(l.q_norm, c.head_dim, false, "a query norm");
        fits(l.k_norm, c.head_dim, false, "a key norm");
        fits(l.q_bias, q, false, "a query bias");
        fits(l.k_bias, kv, false, "a key bias");
        fits(l.v_bias, kv, false, "a value bias");
        fits(l.o_bias, c.hidden, false, "an attention output bias");
        if (l.window < 0 || l.rope < 0 || l.rope >= static_cast<int>(ropes.size()))
            throw std::invalid_argument("a layer's window or rope table is out of range");
    }
    for (const Rope& rope : ropes)
        if (static_cast<int>(rope.half()) * 2 != c.head_dim)
            throw std::invalid_argument("a rope table does not fit the head size");
}

}  // namespace

Model::Model(Config config, std::vector<Layer> layers, Matrix embedding, Matrix head, std::vector<float> final_norm,
             std::vector<std::vector<float>> ropes, const Kernels& kernels, int threads, bool kv_f32, int64_t kv_limit)
    : config_(config),
      layers_(std::move(layers)),
      embedding_(std::move(embedding)),
      head_(std::move(head)),
      final_norm_(std::move(final_norm)),
      ropes_(ropes.begin(), ropes.end()),
      kernels_(kernels),
      pool_(threads),
      kv_({static_cast<int>(layers_.size()), config.kv_heads, config.head_dim, kv_f32}, kv_limit),
      next_job_(layers_.size()),
      bests_(static_cast<size_t>(pool_.size()) * kChunk) {
    check(config_, layers_, embedding_, head_, final_norm_, ropes_);
    Scratch& s = scratch_;
    const int dim = kv_.shape().dim_padded();
    int hidden = round_up(config_.hidden, 64), inner = 0, pair = 0;
    s.x.resize(static_cast<size_t>(pool_.size()));
    s.in.resize(static_cast<size_t>(pool_.size()));
    const auto input = [&](const Matrix& m) {
        hidden = std::max(hidden, m.in_padded());
        for (ActBuffer& in : s.in) in.need(m.acts(), m.groups);
    };
    input(head_);
    int q = 0, k = 0, v = 0, y = 0;
    for (const Layer& l : layers_) {
        for (const Matrix* m : {&l.q, &l.k, &l.v, &l.gate, &l.up}) input(*m);
        s.heads.need(l.o.acts(), l.o.groups);
        s.middle.need(l.down.acts(), l.down.groups);
        q = std::max(q, l.q.out_padded());
        k = std::max(k, l.k.out_padded());
        v = std::max(v, l.v.out_padded());
        y = std::max({y, l.o.out_padded(), l.down.out_padded()});
        inner = std::max({inner, l.o.in_padded(), l.down.in_padded()});
        pair = 2 * kGateRows * kChunk;
    }
    for (int i = 0; i < pool_.size(); ++i) {
        s.x[static_cast<size_t>(i)] = Buffer<float>(static_cast<size_t>(kChunk) * hidden);
        s.line.emplace_back(static_cast<size_t>(std::max(hidden, inner)));
        s.pair.emplace_back(static_cast<size_t>(pair));
    }
    s.q = Buffer<float>(static_cast<size_t>(kChunk) * q);
    s.k = Buffer<float>(static_cast<size_t>(kChunk) * k);
    s.v = Buffer<float>(static_cast<size_t>(kChunk) * v);
    s.y = Buffer<float>(static_cast<size_t>(kChunk) * y);
    s.rotated = Buffer<float>(static_cast<size_t>(kChunk) * config_.heads * dim);
    s.attended = Buffer<float>(static_cast<size_t>(kChunk) * config_.heads * dim);
    s.hidden_stride = hidden;
}

size_t Model::weight_bytes() const {
    size_t bytes = embedding_.bytes() + (head_.data != embedding_.data ? head_.bytes() : 0);
    for (const Layer& l : layers_)
        for (const Matrix* m : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) bytes += m->bytes();
    return bytes;
}

std::array<double, kPhases> Model::take_timings() {
    const auto taken = seconds_;
    seconds_.fill(0.0);
    return taken;
}

}  // namespace outpace
