#include "model/parallel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "model/run.h"
#include "weights/pack.h"

namespace outpace {
namespace {

constexpr int kShared = 8;  // scores among which a sampled slot's chance is shared: RIVALS of drafters/learned/picks.py

struct Settled {
    KV& kv;
    ~Settled() { kv.settle(); }
};

void once(std::vector<int> rows, const char* what) {
    std::sort(rows.begin(), rows.end());
    if (std::adjacent_find(rows.begin(), rows.end()) != rows.end())
        throw std::invalid_argument(std::string(what) + ": a row appears twice");
}

}  // namespace

Parallel::Parallel(std::shared_ptr<Model> model, Matrix fuse, std::vector<float> norm, std::vector<int32_t> tokens, Shape shape,
                   std::optional<Markov> markov, std::optional<Sure> sure)
    : model_(std::move(model)),
      fusion_(*model_, std::move(fuse), {}),
      norm_(std::move(norm)),
      tokens_(std::move(tokens)),
      shape_(shape),
      markov_(std::move(markov)),
      sure_(std::move(sure)),
      stretches_((model_->outputs() + kStretch - 1) / kStretch),
      stride_(model_->head_.out_padded()) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("this is no block-parallel drafter: " + what); };
    if (!model_->layers_[0].embed_norm.empty()) wrong("its first layer reads features beside embeddings");
    if (static_cast<int>(norm_.size()) != model_->hidden())
        wrong("the norm of its contexts has " + std::to_string(norm_.size()) + " values");
    if (static_cast<int>(tokens_.size()) != model_->outputs())
        wrong("it does not name a token for each row of its head");
    for (size_t i = 0; i < tokens_.size(); ++i)
        if (tokens_[i] < 0 || tokens_[i] >= model_->vocab() || (i > 0 && tokens_[i] <= tokens_[i - 1]))
            wrong("its tokens must ascend within the target's vocabulary");
    if (shape_.block < 1 || shape_.block > kChunk || slots() < 1)
        wrong("a block of " + std::to_string(shape_.block) + " tokens");
    if (shape_.mask < 0 || shape_.mask >= model_->vocab()) wrong("its mask token is " + std::to_string(shape_.mask));
    if (markov_ && (markov_->before.rows != model_->vocab() || markov_->after.rows != model_->outputs() ||
                    markov_->after.cols != rank()))
        wrong("the two sides of its Markov head do not fit");
    const size_t hidden = static_cast<size_t>(model_->hidden());
    if (sure_ && sure_->weight.size() != hidden && sure_->weight.size() != hidden + static_cast<size_t>(rank()))
        wrong("its confidence head reads " + std::to_string(sure_->weight.size()) + " values");
    if (markov_) {
        const Matrix& after = markov_->after;
        acts_.need(static_cast<size_t>(after.groups) * kChunk * static_cast<size_t>(act_bytes(after.acts())));
    }
    lists_.assign(static_cast<size_t>(model_->threads()), std::vector<Shortlist>(kChunk));
}

void Parallel::read(const std::vector<Context>& contexts) {
    Model& m = *model_;
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed contexts: " + what); };
    std::vector<int> seen;
    std::vector<KV::Need> needs;
    for (const Context& context : contexts) {
        const int n = static_cast<int>(context.positions.size());
        if (static_cast<int64_t>(m.kv_.length(context.row)) + n > m.config_.max_length)
            wrong("more than " + std::to_string(m.config_.max_length));
        for (const int32_t position : context.positions)
            if (position < 0 || position >= m.config_.max_length) wrong("position " + std::to_string(position));
        seen.push_back(context.row);
        needs.push_back({context.row, n});
    }
    once(std::move(seen), "malformed contexts");
    const Settled settled{m.kv_};
    m.kv_.grow(needs);
    size_t block_count = 0;
    for (const Context& context : contexts) block_count += static_cast<size_t>(m.kv_.blocks_of(context.row));
    m.blocks_.clear();
    m.blocks_.reserve(block_count);  // no reallocation below: tokens keep pointers
    m.tokens_.clear();
    std::vector<const float*> taps;
    int last = -1;
    for (const Context& context : contexts) {
        const int length = m.kv_.length(context.row);
        const uint8_t* const* blocks = m.blocks_.data() + m.blocks_.size();
        for (int i = 0; i < m.kv_.blocks_of(context.row); ++i) m.blocks_.push_back(m.kv_.block_of(context.row, i));
        for (size_t i = 0; i < context.positions.size(); ++i) {
            const int at = length + static_cast<int>(i);
            m.tokens_.push_back({0, context.row, at, context.positions[i], at, length, nullptr, blocks, -1});
            taps.push_back(context.taps + i * fusion_.wide());
            last = std::max(last, static_cast<int>(context.positions[i]));
        }
    }
    for (Rope& rope : m.ropes_) rope.cover(last + 1);
    const size_t hidden = static_cast<size_t>(m.config_.hidden);
    std::vector<float> features(taps.size() * hidden);
    fusion_.run(m, taps, features.data());
    Pool& pool = m.runtime_->pool();
    BatchView batch{};
    batch.tokens = static_cast<int>(taps.size());
    batch.layers = static_cast<int>(m.layers_.size());
    Result nothing;
    double work = 0.0;
    for (const Layer& l : m.layers_) work += static_cast<double>(l.k.bytes() + l.v.bytes());
    for (int first = 0; first < batch.tokens; first += kChunk) {
        const int count = std::min(kChunk, batch.tokens - first);
        m.plan_jobs(first, count, pool.team(Pool::kDrafting));
        Model::Run run(m, pool, nothing, batch, first, count);
        pool.run([&](Seat& me) {
            const Part part = run.tokens(me);
            float* line = m.scratch_.line[static_cast<size_t>(me.id)].get();
            for (int t = part.begin; t < part.end; ++t) {
                const float* from = features.data() + static_cast<size_t>(first + t) * hidden;
                m.kernels_.rmsnorm(from, norm_.data(), m.config_.eps, m.config_.hidden, line);
                for (const Layer& l : m.layers_) run.encode_line(me, m.config_.hidden, count, t, {&l.k, &l.v});
            }
            if (!run.solo_ && !pool.meet(me)) return;
            for (int l = 0; l < batch.layers; ++l) {
                const Layer& layer = m.layers_[static_cast<size_t>(l)];
                if (l > 0 && !pool.meet(me)) return;
                run.products(me, l, {{&layer.k, m.scratch_.k.get()}, {&layer.v, m.scratch_.v.get()}});
                if (!pool.meet(me)) return;
                run.rope(me, layer, l, m.config_.heads);
            }
        }, Pool::kDrafting, work);
    }
    for (const KV::Need& need : needs) m.kv_.lengthen(need.row, need.positions);
}

void Parallel::check(const std::vector<Ask>& asks) const {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed draft: " + what); };
    std::vector<int> seen;
    for (const Ask& ask : asks) {
        seen.push_back(ask.row);
        if (model_->kv_.length(ask.row) < 1) wrong("row " + std::to_string(ask.row) + " has no contexts");
        if (ask.anchor < 0 || ask.anchor >= model_->vocab())
            wrong("token " + std::to_string(ask.anchor) + " is not in the vocabulary");
        if (ask.position < 0 || ask.position >= model_->config_.max_length)
            wrong("position " + std::to_string(ask.position));
        if (ask.slots < 1 || ask.slots > slots()) wrong(std::to_string(ask.slots) + " slots of " + std::to_string(slots()));
        if (!(ask.sampling.temperature >= 0.0) || std::isinf(ask.sampling.temperature))
            wrong("a temperature must be finite and not below 0");
    }
    once(std::move(seen), "malformed draft");
}

// Normed states and the head's logits of all slots that are wanted, ask after ask.
void Parallel::forward(const std::vector<Ask>& asks) {
    check(asks);
    Model& m = *model_;
    Pool& pool = m.runtime_->pool();
    const Settled settled{m.kv_};
    std::vector<KV::Need> needs;
    for (const Ask& ask : asks) needs.push_back({ask.row, shape_.block});
    m.kv_.grow(needs);
    size_t block_count = 0;
    for (const Ask& ask : asks) block_count += static_cast<size_t>(m.kv_.blocks_of(ask.row));
    m.blocks_.clear();
    m.blocks_.reserve(block_count);  // as in `read`
    m.tokens_.clear();
    Result result;
    int last = 0, wanted = 0;
    for (const Ask& ask : asks) {
        const int length = m.kv_.length(ask.row), skipped = !shape_.from_anchor;
        const uint8_t* const* blocks = m.blocks_.data() + m.blocks_.size();
        for (int i = 0; i < m.kv_.blocks_of(ask.row); ++i) m.blocks_.push_back(m.kv_.block_of(ask.row, i));
        for (int i = 0; i < shape_.block; ++i) {
            const bool its = i >= skipped && i < skipped + ask.slots;
            // The whole block sees up to its own end.
            m.tokens_.push_back({i == 0 ? ask.anchor : shape_.mask, ask.row, length + shape_.block - 1, ask.position + i,
                                 length + i, length, nullptr, blocks, its ? wanted : -1});
            result.tap_place.push_back(its ? wanted++ : -1);
        }
        last = std::max(last, ask.position + shape_.block);
    }
    for (Rope& rope : m.ropes_) rope.cover(last);
    const size_t hidden = static_cast<size_t>(m.config_.hidden), places = static_cast<size_t>(wanted);
    result.taps.reset(new float[places * hidden]);
    logits_.need(places * static_cast<size_t>(stride_));
    BatchView batch{};
    batch.tokens = static_cast<int>(m.tokens_.size());
    batch.layers = static_cast<int>(m.layers_.size());
    batch.taps = {batch.layers - 1};
    const Matrix& head = m.head_;
    const int step = kChunk / shape_.block * shape_.block;  // a block is never cut: its tokens' keys are written together
    for (int first = 0; first < batch.tokens; first += step) {
        const int count = std::min(step, batch.tokens - first);
        m.plan_jobs(first, count, pool.team(Pool::kDrafting));
        Model::Run run(m, pool, result, batch, first, count);
        float* y = logits_.get() + static_cast<size_t>(run.token(run.wanted_[0]).wanted) * static_cast<size_t>(stride_);
        pool.run([&](Seat& me) {
            run.clock(me, kPhases);
            for (int l = 0; l < batch.layers; ++l)
                if (!run.layer(me, l)) return;
            if (!run.end_layers(me)) return;
            run.share(me, Model::kClaimQkv, batch.layers, head.blocks, [&](int from, int to) {
                const uint8_t* in = m.scratch_.in[static_cast<size_t>(run.mine(me))].get(head.acts());
                m.kernels_.matmul(head, in, static_cast<int>(run.wanted_.size()), from, to, y, stride_);
            });
            run.clock(me, kHead);
        }, Pool::kDrafting, static_cast<double>(bytes() - fusion_.bytes()));
    }
    normed_.resize(places * hidden);
    m.final_norm(result.taps.get(), wanted, normed_.data());
}

// before_ of tokens, and the same encoded.
void Parallel::encode(const std::vector<int32_t>& tokens) {
    const Matrix& after = markov_->after;
    const size_t wide = static_cast<size_t>(rank());
    before_.resize(tokens.size() * wide);
    std::vector<float> line(static_cast<size_t>(after.in_padded()));
    for (size_t i = 0; i < tokens.size(); ++i) {
        unpack_row(markov_->before, tokens[i], before_.data() + i * wide);
        std::copy_n(before_.data() + i * wide, wide, line.data());
        model_->kernels_.encode(after.acts(), line.data(), 0, after.groups, acts_.get(), static_cast<int>(tokens.size()),
                                static_cast<int>(i));
    }
}

float Parallel::accepted(size_t place, size_t before) const {
    const size_t hidden = static_cast<size_t>(model_->hidden());
    double sum = static_cast<double>(sure_->bias);
    for (size_t i = 0; i < sure_->weight.size(); ++i) {
        const float read = i < hidden ? normed_[place * hidden + i] : before_[before * static_cast<size_t>(rank()) + i - hidden];
        sum += static_cast<double>(sure_->weight[i]) * static_cast<double>(read);
    }
    return static_cast<float>(1.0 / (1.0 + std::exp(-sum)));
}

// Slot `s` of asks `at`, at most kChunk, whose slots' places begin at `places`: a token more in each of their drafts.
void Parallel::slot(const std::vector<Ask>& asks, const std::vector<size_t>& at, const std::vector<size_t>& places, int s,
                    std::vector<Draft>& drafts) {
    Model& m = *model_;
    const int count = static_cast<int>(at.size());
    std::vector<Sampling> sampling;
    for (const size_t i : at) {
        sampling.push_back(asks[i].sampling);
        sampling.back().index += static_cast<uint32_t>(s);
    }
    const auto listed = [&](int i) { return sampling[static_cast<size_t>(i)].temperature > 0.0 ? kShared : 1; };
    const auto place = [&](int i) { return places[at[static_cast<size_t>(i)]] + static_cast<size_t>(s); };
    if (markov_) {
        std::vector<int32_t> tokens;
        for (const size_t i : at) tokens.push_back(s == 0 ? asks[i].anchor : tokens_[static_cast<size_t>(drafts[i].places.back())]);
        encode(tokens);
    }
    for (std::vector<Shortlist>& lists : lists_)
        for (int i = 0; i < count; ++i) lists[static_cast<size_t>(i)].begin(listed(i));
    masses_.resize(static_cast<size_t>(count) * static_cast<size_t>(stretches_));
    const auto consider = [&](Seat& me, int stretch) {
        const int from = stretch * kStretch, n = std::min(kStretch, m.config_.outputs - from);
        float* y = m.scratch_.pair[static_cast<size_t>(me.id)].get();  // [count][kStretch]
        if (markov_) {
            const int begin = from / kRows, end = std::min(begin + kStretch / kRows, markov_->after.blocks);
            m.kernels_.matmul(markov_->after, acts_.get(), count, begin, end, y - from, kStretch);
        }
        for (int i = 0; i < count; ++i) {
            const float* x = logits_.get() + place(i) * static_cast<size_t>(stride_) + from;
            if (markov_) {
                m.kernels_.add(y + i * kStretch, x, n);
                x = y + i * kStretch;
            }
            Shortlist& list = lists_[static_cast<size_t>(me.id)][static_cast<size_t>(i)];
            masses_[static_cast<size_t>(i) * static_cast<size_t>(stretches_) + static_cast<size_t>(stretch)] =
                list.consider(x, from, n, tokens_.data() + from, sampling[static_cast<size_t>(i)], m.kernels_, !sure_);
        }
    };
    m.runtime_->pool().run([&](Seat& me) {
        const Part part = me.of(stretches_);
        for (int stretch = part.begin; stretch < part.end; ++stretch) consider(me, stretch);
    }, Pool::kDrafting, static_cast<double>(markov_ ? markov_->after.bytes() : logits_.size()));
    for (int i = 0; i < count; ++i) {
        const Mass all = whole(masses_.data() + static_cast<size_t>(i) * static_cast<size_t>(stretches_), stretches_);
        if (std::isnan(all.top)) throw NotFinite("the drafter's network produced NaN or infinite logits: check its weights");
        Shortlist merged;
        merged.begin(listed(i));
        for (const std::vector<Shortlist>& lists : lists_) merged.add(lists[static_cast<size_t>(i)]);
        const bool sampled = sampling[static_cast<size_t>(i)].temperature > 0.0;
        const float chance = sure_ && !sampled ? accepted(place(i), static_cast<size_t>(i))
                                               : static_cast<float>(merged.shares(all, sampled).front());
        if (!std::isfinite(chance)) throw NotFinite("the drafter's confidence is NaN: check its weights");
        Draft& draft = drafts[at[static_cast<size_t>(i)]];
        draft.places.push_back(merged.entries().front().place);
        draft.chances.push_back(chance);
    }
}

std::vector<Parallel::Draft> Parallel::draft(const std::vector<Ask>& asks) {
    forward(asks);
    std::vector<Draft> drafts(asks.size());
    std::vector<size_t> places;
    size_t next = 0;
    for (const Ask& ask : asks) {
        places.push_back(next);
        next += static_cast<size_t>(ask.slots);
    }
    for (int s = 0; s < slots(); ++s) {
        std::vector<size_t> at;
        for (size_t i = 0; i < asks.size(); ++i) {
            if (asks[i].slots > s) at.push_back(i);
            if (!at.empty() && (at.size() == kChunk || i + 1 == asks.size())) {
                slot(asks, at, places, s, drafts);
                at.clear();
            }
        }
    }
    return drafts;
}

void Parallel::states(const std::vector<Ask>& asks, float* normed, float* logits) {
    forward(asks);
    std::copy(normed_.begin(), normed_.end(), normed);
    const size_t outputs = static_cast<size_t>(model_->outputs());
    const size_t places = normed_.size() / static_cast<size_t>(model_->hidden());
    for (size_t i = 0; i < places; ++i)
        std::copy_n(logits_.get() + i * static_cast<size_t>(stride_), outputs, logits + i * outputs);
}

void Parallel::bias(const std::vector<int32_t>& tokens, float* before, float* after) {
    if (!markov_) throw std::invalid_argument("this drafter has no Markov head");
    const Matrix& m = markov_->after;
    std::vector<float> padded(std::min<size_t>(kChunk, tokens.size()) * static_cast<size_t>(m.out_padded()));
    for (size_t first = 0; first < tokens.size(); first += kChunk) {
        const size_t n = std::min<size_t>(kChunk, tokens.size() - first);
        encode({tokens.begin() + static_cast<std::ptrdiff_t>(first), tokens.begin() + static_cast<std::ptrdiff_t>(first + n)});
        before = std::copy(before_.begin(), before_.end(), before);
        model_->kernels_.matmul(m, acts_.get(), static_cast<int>(n), 0, m.blocks, padded.data(), m.out_padded());
        for (size_t i = 0; i < n; ++i) after = std::copy_n(padded.data() + i * static_cast<size_t>(m.out_padded()), m.rows, after);
    }
}

}  // namespace outpace
