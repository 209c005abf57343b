#include "model/parallel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/functions.h"
#include "model/run.h"
#include "runtime/denormals.h"
#include "weights/pack.h"

namespace outpace {
namespace {

constexpr int kShared = 8;  // scores among which a sampled slot's chance is shared: RIVALS of drafters/learned/picks.py

}  // namespace

Parallel::Parallel(std::shared_ptr<Model> model, Matrix fuse, std::vector<float> norm, std::vector<int32_t> tokens, Shape shape,
    std::optional<Markov> markov, std::optional<Confidence> confidence)
    : DraftNetwork(std::move(model), std::move(fuse), {}, std::move(tokens)),
      norm_(std::move(norm)),
      shape_(shape),
      markov_(std::move(markov)),
      confidence_(std::move(confidence)),
      stride_(model_->weights_->head.out_padded()) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("this is no block-parallel drafter: " + what); };
    if (!model_->weights_->layers[0].embed_norm.empty()) wrong("its first layer reads features beside embeddings");
    if (static_cast<int>(norm_.size()) != model_->hidden())
        wrong("the norm of its contexts has " + std::to_string(norm_.size()) + " values");
    if (shape_.block < 1 || shape_.block > kChunk || slots() < 1) wrong("a block of " + std::to_string(shape_.block) + " tokens");
    if (shape_.mask < 0 || shape_.mask >= model_->vocab()) wrong("its mask token is " + std::to_string(shape_.mask));
    if (markov_ && (markov_->before.rows != model_->vocab() || markov_->after.rows != model_->outputs() || markov_->after.cols != rank()))
        wrong("the two sides of its Markov head do not fit");
    const size_t hidden = static_cast<size_t>(model_->hidden());
    if (confidence_ && confidence_->weight.size() != hidden && confidence_->weight.size() != hidden + static_cast<size_t>(rank()))
        wrong("its confidence head reads " + std::to_string(confidence_->weight.size()) + " values");
    if (markov_) {
        const Matrix& after = markov_->after;
        acts_.need(static_cast<size_t>(after.groups) * kChunk * static_cast<size_t>(act_bytes(after.acts())));
    }
}

void Parallel::read(const std::vector<Context>& contexts) {
    std::lock_guard<std::mutex> lock(model_->lock());
    Model& m = *model_;
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed contexts: " + what); };
    std::vector<int> rows;
    std::vector<KV::Need> needs;
    for (const Context& context : contexts) {
        const int n = static_cast<int>(context.positions.size());
        if (static_cast<int64_t>(m.kv_.length(context.row)) + n > m.weights_->config.max_length)
            wrong("more than " + std::to_string(m.weights_->config.max_length));
        for (const int32_t position : context.positions)
            if (position < 0 || position >= m.weights_->config.max_length) wrong("position " + std::to_string(position));
        rows.push_back(context.row);
        needs.push_back({context.row, n});
    }
    check_once(std::move(rows));
    const Settled settled{m.kv_};
    m.kv_.grow(needs);
    m.plan_.clear();
    std::vector<const float*> states;
    for (const Context& context : contexts) {
        const int length = m.kv_.length(context.row);
        const Plan::Row row = m.plan_.row(m.kv_, context.row, length);
        for (size_t i = 0; i < context.positions.size(); ++i) {
            const int slot = length + static_cast<int>(i);
            m.plan_.in_block(row, 0, context.positions[i], slot, slot);
            states.push_back(context.states + i * wide());
        }
    }
    m.cover();
    const size_t hidden = static_cast<size_t>(m.weights_->config.hidden);
    const std::vector<float> features = this->features(states);
    const BatchView batch = planned(nullptr);
    Result nothing;
    size_t bytes = 0;
    for (const Layer& l : m.weights_->layers) bytes += l.k.bytes() + l.v.bytes();
    Model::Run::each_chunk(m, nothing, batch, kChunk, [&](Model::Run& run) {
        run.draft(bytes, [&](Seat& me) {
            const Part part = run.tokens(me);
            float* line = m.scratch_.line[static_cast<size_t>(me.id)].get();
            for (int t = part.begin; t < part.end; ++t) {
                const float* from = features.data() + static_cast<size_t>(run.first_ + t) * hidden;
                m.kernels_.rmsnorm(from, norm_.data(), m.weights_->config.eps, m.weights_->config.hidden, line);
                for (const Layer& l : m.weights_->layers) run.encode_line(me, m.weights_->config.hidden, run.n_, t, {&l.k, &l.v});
            }
            if (!run.solo_ && !run.meet(me)) return;
            for (int l = 0; l < batch.layers; ++l) {
                const Layer& layer = m.weights_->layers[static_cast<size_t>(l)];
                if (l > 0 && !run.meet(me)) return;
                run.products(me, l, {{&layer.k, m.scratch_.k.get()}, {&layer.v, m.scratch_.v.get()}});
                if (!run.meet(me)) return;
                run.rope(me, layer, l, m.weights_->config.heads);
            }
        });
    });
    for (const KV::Need& need : needs) m.kv_.lengthen(need.row, need.positions);
}

void Parallel::check(const std::vector<Ask>& asks) const {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed draft: " + what); };
    std::vector<int> rows;
    for (const Ask& ask : asks) {
        rows.push_back(ask.row);
        if (model_->kv_.length(ask.row) < 1) wrong("row " + std::to_string(ask.row) + " has no contexts");
        check_token(ask.anchor);
        if (ask.position < 0 || ask.position >= model_->weights_->config.max_length) wrong("position " + std::to_string(ask.position));
        if (ask.slots < 1 || ask.slots > slots()) wrong(std::to_string(ask.slots) + " slots of " + std::to_string(slots()));
        check_noise(ask.sampling);
    }
    check_once(std::move(rows));
}

// Normed states and the head's logits of all slots that are wanted, ask after ask.
void Parallel::forward(const std::vector<Ask>& asks) {
    check(asks);
    Model& m = *model_;
    const Settled settled{m.kv_};
    std::vector<KV::Need> needs;
    for (const Ask& ask : asks) needs.push_back({ask.row, shape_.block});
    m.kv_.grow(needs);
    m.plan_.clear();
    Result result;
    int wanted = 0;
    for (const Ask& ask : asks) {
        const int length = m.kv_.length(ask.row), skipped = !shape_.from_anchor;
        const Plan::Row row = m.plan_.row(m.kv_, ask.row, length);
        for (int i = 0; i < shape_.block; ++i) {
            const bool read = i >= skipped && i < skipped + ask.slots;
            Plan::Token& token = m.plan_.in_block(
                row, i == 0 ? ask.anchor : shape_.mask, ask.position + i, length + i, length + shape_.block - 1);
            if (read) token.wanted = wanted++;
            result.hidden_place.push_back(token.wanted);
        }
    }
    m.cover();
    const size_t hidden = static_cast<size_t>(m.weights_->config.hidden), places = static_cast<size_t>(wanted);
    result.hidden_states.reset(new float[places * hidden]);
    logits_.need(places * static_cast<size_t>(stride_));
    const BatchView batch = planned(nullptr);
    const Matrix& head = m.weights_->head;
    // A block is never cut: its tokens' keys are written together.
    Model::Run::each_chunk(m, result, batch, kChunk / shape_.block * shape_.block, [&](Model::Run& run) {
        float* y = logits_of(static_cast<size_t>(run.token(run.wanted_[0]).wanted));
        run.draft(bytes() - fuse_.bytes(), [&](Seat& me) {
            if (!run.layers(me)) return;
            run.share(me, Model::kClaimQkv, batch.layers, head.blocks, [&](int from, int to) {
                const uint8_t* in = m.scratch_.in[static_cast<size_t>(run.mine(me))].get(head.acts());
                m.kernels_.matmul(head, in, static_cast<int>(run.wanted_.size()), from, to, y, stride_);
            });
            run.clock(me, kHead);
        });
    });
    normed_.resize(places * hidden);
    m.final_norm(result.hidden_states.get(), wanted, normed_.data());
}

// before_ of tokens, and the same encoded.
void Parallel::encode(const std::vector<int32_t>& tokens) {
    const DenormalsAsZero mode;
    const Matrix& after = markov_->after;
    const size_t wide = static_cast<size_t>(rank());
    before_.resize(tokens.size() * wide);
    for (size_t i = 0; i < tokens.size(); ++i) unpack_row(markov_->before, tokens[i], before_.data() + i * wide);
    encode_rows(model_->kernels_, after, before_.data(), static_cast<int>(tokens.size()), acts_.get());
}

float Parallel::accepted(size_t place, size_t before) const {
    const size_t hidden = static_cast<size_t>(model_->hidden());
    double sum = static_cast<double>(confidence_->bias);
    for (size_t i = 0; i < confidence_->weight.size(); ++i) {
        const float read = i < hidden ? normed_[place * hidden + i] : before_[before * static_cast<size_t>(rank()) + i - hidden];
        sum += static_cast<double>(confidence_->weight[i]) * static_cast<double>(read);
    }
    return static_cast<float>(std::isnan(sum) ? sum : 1.0 / (1.0 + exponential(-sum)));
}

// One slot each of some asks, at most kChunk: a token more in each of their drafts.
void Parallel::decide(const std::vector<Ask>& asks, const std::vector<Slot>& slots, std::vector<std::vector<RankedToken>>& drafts) {
    Model& m = *model_;
    const int count = static_cast<int>(slots.size());
    std::vector<Ranking::Row> ranked;
    std::vector<int32_t> tokens;
    for (const Slot& slot : slots) {
        Sampling sampling = asks[slot.ask].sampling;
        sampling.index += static_cast<uint32_t>(slot.index);
        ranked.push_back({sampling, 1, kShared, !confidence_});
        tokens.push_back(slot.index == 0 ? asks[slot.ask].anchor : drafts[slot.ask].back().token);
    }
    if (markov_) encode(tokens);
    ranking_.begin(ranked);
    const auto consider = [&](Seat& me, int stretch) {
        const int from = ranking_.begin_of(stretch);
        float* y = m.scratch_.pair[static_cast<size_t>(me.id)].get();  // [count][kStretch]
        if (markov_) stretch_product(m.kernels_, markov_->after, acts_.get(), count, stretch, y);
        for (int i = 0; i < count; ++i) {
            float* x = logits_of(slots[static_cast<size_t>(i)].place) + from;
            if (markov_) m.kernels_.add(x, y + i * kStretch, ranking_.size_of(stretch));
            ranking_.consider(me.id, i, stretch, x, m.kernels_);
        }
    };
    m.runtime_->pool().run([&](Seat& me) {
        const Part part = me.of(ranking_.stretches());
        for (int stretch = part.begin; stretch < part.end; ++stretch) consider(me, stretch);
    }, Pool::kDrafting, static_cast<double>(markov_ ? markov_->after.bytes() : logits_.size()));
    for (int i = 0; i < count; ++i) {
        const size_t at = static_cast<size_t>(i);
        RankedToken chosen = ranking_.best(i, logits_of(slots[at].place), m.kernels_).front();
        if (confidence_ && ranked[at].sampling.temperature <= 0.0) chosen.share = static_cast<double>(accepted(slots[at].place, at));
        if (!std::isfinite(chosen.share)) throw NotFinite();
        drafts[slots[at].ask].push_back(chosen);
    }
}

std::vector<std::vector<RankedToken>> Parallel::draft(const std::vector<Ask>& asks) {
    std::lock_guard<std::mutex> lock(model_->lock());
    forward(asks);
    std::vector<std::vector<RankedToken>> drafts(asks.size());
    for (int s = 0; s < slots(); ++s) {
        std::vector<Slot> together;
        size_t first = 0;  // place of the ask's first slot
        for (size_t i = 0; i < asks.size(); first += static_cast<size_t>(asks[i++].slots)) {
            if (asks[i].slots > s) together.push_back({i, first + static_cast<size_t>(s), s});
            if (together.size() == kChunk || (!together.empty() && i + 1 == asks.size())) decide(asks, std::exchange(together, {}), drafts);
        }
    }
    return drafts;
}

std::pair<std::vector<float>, std::vector<float>> Parallel::states(const std::vector<Ask>& asks) {
    std::lock_guard<std::mutex> lock(model_->lock());
    forward(asks);
    std::vector<float> logits;
    for (size_t i = 0; i < normed_.size() / static_cast<size_t>(model_->hidden()); ++i)
        logits.insert(logits.end(), logits_of(i), logits_of(i) + model_->outputs());
    return {normed_, std::move(logits)};
}

std::pair<std::vector<float>, std::vector<float>> Parallel::bias(const std::vector<int32_t>& tokens) {
    if (!markov_) throw std::invalid_argument("this drafter has no Markov head");
    for (const int32_t token : tokens) check_token(token);
    std::lock_guard<std::mutex> lock(model_->lock());
    const DenormalsAsZero mode;
    const Matrix& m = markov_->after;
    std::vector<float> before, after, padded(kChunk * static_cast<size_t>(m.out_padded()));
    for (size_t first = 0; first < tokens.size(); first += kChunk) {
        const size_t n = std::min<size_t>(kChunk, tokens.size() - first);
        encode({tokens.begin() + static_cast<std::ptrdiff_t>(first), tokens.begin() + static_cast<std::ptrdiff_t>(first + n)});
        before.insert(before.end(), before_.begin(), before_.end());
        model_->kernels_.matmul(m, acts_.get(), static_cast<int>(n), 0, m.blocks, padded.data(), m.out_padded());
        for (const float* y = padded.data(); y < padded.data() + n * static_cast<size_t>(m.out_padded()); y += m.out_padded())
            after.insert(after.end(), y, y + m.rows);
    }
    return {std::move(before), std::move(after)};
}

}  // namespace outpace
