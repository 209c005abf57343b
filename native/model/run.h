// One chunk of tokens through all layers: what the threads of a forward share. Its phases stand in forward.cpp and attend.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "model/model.h"
#include "runtime/denormals.h"
#include "weights/pack.h"

namespace outpace {

class Model::Run {
public:
    Run(Model& model, Pool& pool, Result& result, const BatchView& batch, int first, int count)
        : m_(model),
          c_(model.weights_->config),
          k_(model.kernels_),
          s_(model.scratch_),
          pool_(pool),
          result_(result),
          batch_(batch),
          first_(first),
          n_(count),
          solo_(count <= kSolo && pool.size() > 1 && model.weights_->layers[0].attn_conv.taps == 0),
          claims_(pool.uneven()) {
        for (int i = first; i < first + count; ++i)
            if (model.plan_[i].wanted >= 0) wanted_.push_back(i - first);
    }

    void forward(Seat& me);
    void settle(int threads);  // on the caller's thread, after the region; how many ended it

private:
    friend class Eagle;
    friend class Parallel;

    // Narrow forwards: every thread computes norms and encodings for all tokens in its own buffers, which is cheaper than
    // a barrier. The numbers are the same.
    int mine(const Seat& me) const { return solo_ ? me.id : 0; }
    Part tokens(const Seat& me) const { return solo_ ? Part{0, n_} : me.of(n_); }
    bool meet(Seat& me) { return pool_.meet(me); }
    float* x(const Seat& me, int t) const { return s_.x[static_cast<size_t>(mine(me))].get() + static_cast<size_t>(t) * m_.hidden_stride_; }
    const Plan::Token& token(int t) const { return m_.plan_[first_ + t]; }

    void clock(const Seat& me, int phase) {
        if (me.id != 0 || !m_.timing_) return;
        const auto now = std::chrono::steady_clock::now();
        if (phase < kPhases) m_.seconds_[static_cast<size_t>(phase)] += std::chrono::duration<double>(now - since_).count();
        since_ = now;
    }

    // x [hidden] -> normed, where the model has such a norm, and encoded for matrices `ms`.
    void encode_normed(const Seat& me, int t, int n, int at, const std::vector<float>& norm, std::initializer_list<const Matrix*> ms) {
        encode_normed(me, t, n, at, norm, ms, s_.in);
    }
    void encode_normed(const Seat& me, int t, int n, int at, const std::vector<float>& norm, std::initializer_list<const Matrix*> ms,
        std::vector<ActBuffer>& to) {
        float* line = s_.line[static_cast<size_t>(me.id)].get();
        if (norm.empty())
            std::memcpy(line, x(me, t), static_cast<size_t>(c_.hidden) * 4);
        else
            k_.rmsnorm(x(me, t), norm.data(), c_.eps, c_.hidden, line);
        encode_line(me, c_.hidden, n, at, ms, to);
    }

    // What feeds a layer forward.
    void encode_fed(const Seat& me, int t, const Layer& l) {
        if (l.experts.count > 0)
            encode_for_experts(me, t, l);
        else if (l.ffn_conv.taps > 0)
            encode_kept(me, t, l.ffn_norm, l.ffn_conv);
        else
            encode_normed(me, t, n_, t, l.ffn_norm, {&l.gate, &l.up});
    }

    // The thread's line, of which `filled` values are set, encoded for matrices `ms`.
    void encode_line(const Seat& me, int filled, int n, int at, std::initializer_list<const Matrix*> ms) {
        encode_line(me, filled, n, at, ms, s_.in);
    }
    void encode_line(const Seat& me, int filled, int n, int at, std::initializer_list<const Matrix*> ms, std::vector<ActBuffer>& to) {
        float* line = s_.line[static_cast<size_t>(me.id)].get();
        std::fill(line + filled, line + m_.hidden_stride_, 0.0f);
        unsigned done = 0;
        for (const Matrix* m : ms) {
            if (!m->data) continue;
            const unsigned bit = 1u << static_cast<unsigned>(m->acts());
            if (done & bit) continue;
            done |= bit;
            k_.encode(m->acts(), line, 0, m->groups, to[static_cast<size_t>(mine(me))].get(m->acts()), n, at);
        }
    }

    // The same for a layer that reads its token's embedding beside x; x is what the layer adds to.
    void encode_joined(const Seat& me, int t, const Layer& l) {
        float *line = s_.line[static_cast<size_t>(me.id)].get(), *at = x(me, t);
        m_.embed(&token(t).id, 1, line);
        k_.rmsnorm(line, l.embed_norm.data(), c_.eps, c_.hidden, line);
        k_.rmsnorm(at, l.attn_norm.data(), c_.eps, c_.hidden, line + c_.hidden);
        if (l.norm_first) std::memcpy(at, line + c_.hidden, static_cast<size_t>(c_.hidden) * 4);
        encode_line(me, 2 * c_.hidden, n_, t, {&l.q, &l.k, &l.v});
    }

    // x += y [hidden], y normed and scaled first where the model does that; y may be the thread's line.
    void add_back(
        const Seat& me, int t, const std::vector<float>& norm, const std::vector<float>& bias, const float* y, float scale = 1.0f) {
        scale *= c_.residual_scale;
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
        if (scale != 1.0f) {
            for (int i = 0; i < c_.hidden; ++i) line[i] = y[i] * scale;
            y = line;
        }
        k_.add(x(me, t), y, c_.hidden);
    }

    static const float* product_in(const Buffer<float>& y, int t, const Matrix& m) {
        return y.get() + static_cast<size_t>(t) * static_cast<size_t>(m.out_padded());
    }
    const float* product_of(int t, const Matrix& m) const { return product_in(s_.y, t, m); }

    // A token's inputs for each layer, one after the other.
    float* input_of(int t) const {
        return s_.inputs.get() + static_cast<size_t>(t) * static_cast<size_t>(m_.weights_->inputs.project.out_padded());
    }

    void keep_hidden(const Seat& me, int t, int layer) {
        if (batch_.hidden_layers.empty() || (solo_ && me.rank != 0)) return;
        const int32_t place = result_.hidden_place[static_cast<size_t>(first_ + t)];
        for (size_t i = 0; i < batch_.hidden_layers.size() && place >= 0; ++i)
            if (batch_.hidden_layers[i] == layer)
                std::memcpy(result_.hidden_states.get() + (static_cast<size_t>(place) * batch_.hidden_layers.size() + i) * c_.hidden,
                    x(me, t), static_cast<size_t>(c_.hidden) * 4);
    }

    // The hidden state that enters layer `l`: an embedding (and the batch's features), or what layer l - 1 made.
    void enter(const Seat& me, int t, int l) {
        if (l == 0) {
            float* at = x(me, t);
            const float* features = batch_.features ? batch_.features + static_cast<size_t>(first_ + t) * static_cast<size_t>(c_.hidden)
                                                    : nullptr;
            const Layer& first = m_.weights_->layers[0];
            if (first.join.data) {
                std::memcpy(at, product_of(t, first.join), static_cast<size_t>(c_.hidden) * 4);
                return;
            }
            if (!first.embed_norm.empty() || m_.beside_) {
                std::memcpy(at, features, static_cast<size_t>(c_.hidden) * 4);
                return;
            }
            m_.embed(&token(t).id, 1, at);
            if (features) k_.add(at, features, c_.hidden);
            return;
        }
        const Layer& before = m_.weights_->layers[static_cast<size_t>(l - 1)];
        if (before.input.gate.data)
            add_back(me, t, before.input.norm, {}, product_of(t, before.input.project));
        else
            add_made(me, t, before);
        if (before.output_scale != 1.0f) {
            float* at = x(me, t);
            for (int i = 0; i < c_.hidden; ++i) at[i] = times(at[i], before.output_scale);
        }
        keep_hidden(me, t, l - 1);
    }
    // What a layer's feed-forward gave, or its attention, where it has no feed-forward.
    void add_made(const Seat& me, int t, const Layer& l) {
        if (l.feeds())
            add_back(me, t, l.post_ffn_norm, {},
                l.experts.count > 0   ? mixed(me, t, l)
                : l.ffn_conv.taps > 0 ? convolved(me, t, l.ffn_conv, 1, s_.y.get(), l.down.out_padded())
                                      : product_of(t, l.down),
                l.fed_scale);
        else
            add_back(me, t, l.post_attn_norm, l.o_bias, made_of_tokens(me, t, l));
    }
    // What attention gave, or what stands in its place, or both.
    const float* made_of_tokens(const Seat& me, int t, const Layer& l) const {
        if (l.attn_conv.taps > 0) return convolved(me, t, l.attn_conv, 1, s_.y.get(), l.o.out_padded());
        const float* own = product_of(t, l.o);
        if (!l.delta.o.data) return own;
        const float* other = product_in(s_.beside, t, l.delta.o);
        float* line = s_.line[static_cast<size_t>(me.id)].get();
        for (int i = 0; i < c_.hidden; ++i) line[i] = times(own[i], l.delta.attended_scale) + times(other[i], l.delta.output_scale);
        return line;
    }

    // work(begin, end) on stretches of `total` units that are this thread's: its share, or, where cores differ, half as much
    // and then what it can get, so that a slow core keeps nobody waiting. Whoever computes a unit, its bits are the same.
    template <class Work>
    void share(const Seat& me, Claim phase, int layer, int total, const Work& work) {
        const int shared = claims_ && me.count > 1 ? total / 2 : total, rest = total - shared;
        const Part own = me.of(shared);
        if (own.begin < own.end) work(own.begin, own.end);
        if (rest == 0) return;
        const int stretch = std::max(1, rest / (4 * me.count));
        std::atomic<int>& next = m_.claimed_[static_cast<size_t>(layer) * kClaims + phase];
        for (int i; (i = next.fetch_add(stretch, std::memory_order_relaxed)) < rest;)
            work(shared + i, shared + std::min(i + stretch, rest));
    }

    // Several products over the same inputs.
    struct Product {
        const Matrix* m;
        float* y;
    };
    void products(const Seat& me, int layer, std::initializer_list<Product> list, Claim claim = kClaimQkv) {
        int total = 0;
        for (const Product& p : list) total += p.m->blocks;
        share(me, claim, layer, total, [&](int from, int to) {
            for (const Product& p : list) {
                const int begin = std::max(from, 0), end = std::min(to, p.m->blocks);
                if (begin < end)
                    k_.matmul(*p.m, s_.in[static_cast<size_t>(mine(me))].get(p.m->acts()), n_, begin, end, p.y, p.m->out_padded());
                from -= p.m->blocks;
                to -= p.m->blocks;
            }
        });
    }

    // Of a convolution over a block; block.cpp.
    void encode_kept(const Seat& me, int t, const std::vector<float>& norm, const LocalConv& conv);
    const float* convolved(const Seat& me, int t, const LocalConv& conv, int side, const float* rows, int stride) const;
    bool convolve_inputs(Seat& me, const LocalConv& conv, Claim claim, int index, std::initializer_list<const Matrix*> ms);

    bool join(Seat& me, const Layer& l);
    bool inputs(Seat& me);
    bool add_input(Seat& me, const Layer& l, int index);
    void begin_layer(const Seat& me, const Layer& l, int index);
    bool layer(Seat& me, int index);
    bool feed(Seat& me, const Layer& l, int index);
    bool store(Seat& me, int index);
    bool end_layers(Seat& me);
    const uint8_t* first_keys(int job, int layer) const;
    void rope(const Seat& me, const Layer& l, int index, int from);
    bool attend(Seat& me, const Layer& l, int index);
    bool attention(Seat& me, const Layer& l, int index);
    void output(const Seat& me, Claim claim, int index, const Matrix& o, Buffer<float>& y) {
        share(me, claim, index, o.blocks,
            [&](int begin, int end) { k_.matmul(o, s_.heads.get(o.acts()), n_, begin, end, y.get(), o.out_padded()); });
    }
    // All layers, and what the head reads; false: the thread is dismissed.
    bool layers(Seat& me) {
        clock(me, kPhases);
        if (m_.weights_->inputs.width > 0 && !inputs(me)) return false;
        for (int l = 0; l < batch_.layers; ++l)
            if (!layer(me, l)) return false;
        return end_layers(me);
    }
    // In a drafter's call: visit(run) for each chunk of at most `step` of the planned tokens.
    template <class Visit>
    static void each_chunk(Model& model, Result& result, const BatchView& batch, int step, const Visit& visit) {
        Pool& pool = model.runtime_->pool();
        for (int first = 0; first < batch.tokens; first += step) {
            const int count = std::min(step, batch.tokens - first);
            model.plan_jobs(first, count, pool.team(Pool::kDrafting));
            Run run(model, pool, result, batch, first, count);
            visit(run);
        }
    }
    // Its body(seat) on all threads; they read so many bytes.
    template <class Body>
    void draft(size_t bytes, const Body& body) {
        pool_.run(body, Pool::kDrafting, static_cast<double>(bytes));
    }

    bool feed_forward(Seat& me, const Layer& l, int index);
    void gate_up(const Seat& me, const Layer& l, int index);
    void down(const Seat& me, const Layer& l, int index) {
        share(me, kClaimDown, index, l.down.blocks,
            [&](int begin, int end) { k_.matmul(l.down, s_.middle.get(l.down.acts()), n_, begin, end, s_.y.get(), l.down.out_padded()); });
    }

    // Of latent attention; latent.cpp.
    bool latent(Seat& me, const Layer& l, int index);
    void absorb(const Seat& me, const Layer& l, int head);
    void store_latent(const Seat& me, const Layer& l, int index, int t);
    void turned(const Layer& l, const Plan::Token& tok, const float* x, float scale, float* to) const;
    // Of all tokens for a head's product with `m`, which has one head's rows after another's.
    const uint8_t* inputs_of(const Matrix& m, int head) const {
        return s_.latents.get(m.acts()) + static_cast<size_t>(head) * static_cast<size_t>(m.groups * n_ * act_bytes(m.acts()));
    }

    // Of a recurrent layer; recurrent.cpp.
    bool recurrence(Seat& me, const Layer& l, int index);
    void taps(const float* own, size_t stride, int place, const Recurrence& of, int t, const float** inputs) const;
    void remember(int place, const Recurrence& of, int t, const float* const* inputs, int from, int width) const;
    bool short_conv(Seat& me, const Layer& l, int index);
    void convolve(const Seat& me, const Layer& l, int place);
    void go_over(const Seat& me, const Layer& l, int place, const Recurrence& of, int head);
    void gate_scanned(const Seat& me, const Layer& l);

    // Of a mixture of experts; experts.cpp.
    bool mixture(Seat& me, const Layer& l, int index);
    void encode_for_experts(const Seat& me, int t, const Layer& l);
    const uint8_t* gathered(const Seat& me, const Experts& e, const Matrix& m, const int* tokens, int count);
    void expert_gate_up(const Seat& me, const Experts& e, const Routes& routes, const Routes::Group& group, int stretch);
    void expert_down(const Experts& e, const Routes::Group& group, int stretch);
    const float* mixed(const Seat& me, int t, const Layer& l) const;

    Model& m_;
    const Config& c_;
    const Kernels& k_;
    Scratch& s_;
    Pool& pool_;
    Result& result_;
    const BatchView& batch_;
    const int first_, n_;
    const bool solo_, claims_;
    std::vector<int> wanted_;
    std::chrono::steady_clock::time_point since_;
};

}  // namespace outpace
