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

constexpr int kMostChildren = 64;
constexpr float kNever = -1e30f;  // the logit of a token that a slot does not choose among: NEVER of drafters/learned/parallel.py
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
    if (!markov_) return;
    const int gated = model_->hidden() + rank();
    const Matrix& mix = markov_->mix;
    const bool selects = mix.data && mix.cols == model_->hidden();
    if (mix.data && !(mix.rows == rank() && (selects || mix.cols == gated)) && !(mix.rows == 3 * rank() && mix.cols == gated + rank()))
        wrong("what its Markov head reads is mixed by " + std::to_string(mix.rows) + " x " + std::to_string(mix.cols));
    if (markov_->candidates < 0 || markov_->candidates > std::min(kMostChildren, model_->outputs()))
        wrong(std::to_string(markov_->candidates) + " candidates");
    if (mix.data && markov_->mix_bias.size() != static_cast<size_t>(selects ? 0 : mix.rows))
        wrong("the bias of its Markov head has " + std::to_string(markov_->mix_bias.size()) + " values");
    for (const Matrix* each : {&markov_->after, &mix})
        if (each->data) acts_.need(static_cast<size_t>(each->groups) * kChunk * static_cast<size_t>(act_bytes(each->acts())));
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
        if (ask.nodes < 1 || ask.branch < 1) wrong(std::to_string(ask.nodes) + " nodes, branch " + std::to_string(ask.branch));
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
                const float cap = m.weights_->config.logit_cap;
                for (size_t i = 0; i < run.wanted_.size() && cap > 0.0f; ++i)
                    m.kernels_.cap(y + i * static_cast<size_t>(stride_) + from * kRows, (to - from) * kRows, cap);
            });
            run.clock(me, kHead);
        });
    });
    normed_.resize(places * hidden);
    m.final_norm(result.hidden_states.get(), wanted, normed_.data());
    for (size_t i = 0; i < places && markov_ && markov_->candidates > 0; ++i) keep_candidates(logits_of(i));
}

// Of a slot's logits all but the candidates' become kNever, the lower token first where two are equal. One that is not finite stays.
void Parallel::keep_candidates(float* logits) const {
    struct Kept {
        float logit;
        int place;
    };
    std::vector<Kept> best;  // likeliest first
    const auto before = [](const Kept& a, const Kept& b) { return a.logit > b.logit; };
    const size_t most = static_cast<size_t>(markov_->candidates);
    for (int place = 0; place < model_->outputs(); ++place) {
        if (!std::isfinite(logits[place])) return;
        const Kept own{logits[place], place};
        if (best.size() == most && !before(own, best.back())) continue;
        if (best.size() == most) best.pop_back();
        best.insert(std::upper_bound(best.begin(), best.end(), own, before), own);
    }
    std::fill(logits, logits + model_->outputs(), kNever);
    for (const Kept& each : best) logits[each.place] = each.logit;
}

void Parallel::encode(const std::vector<int32_t>& tokens, const std::vector<const float*>& states) {
    const DenormalsAsZero mode;
    const Matrix &after = markov_->after, &mix = markov_->mix;
    const size_t wide = static_cast<size_t>(rank()), hidden = static_cast<size_t>(model_->hidden()), n = tokens.size();
    const bool recurrent = mix.data && mix.rows != rank(), selects = mix.data && mix.cols == model_->hidden();
    before_.resize(n * wide);
    for (size_t i = 0; i < n; ++i) unpack_row(markov_->before, tokens[i], before_.data() + i * wide);
    std::vector<float> reads = before_;
    if (mix.data) {
        std::vector<float> joined;
        joined.reserve(n * static_cast<size_t>(mix.cols));
        for (size_t i = 0; i < n; ++i) {
            const auto known = before_.begin() + static_cast<std::ptrdiff_t>(i * wide);
            const auto last = left_.begin() + static_cast<std::ptrdiff_t>(i * wide);
            const auto end = static_cast<std::ptrdiff_t>(wide);
            if (recurrent) joined.insert(joined.end(), last, last + end), joined.insert(joined.end(), known, known + end);
            joined.insert(joined.end(), states[i], states[i] + hidden);
            if (!recurrent && !selects) joined.insert(joined.end(), known, known + end);
        }
        const size_t stride = static_cast<size_t>(mix.out_padded());
        mixed_.need(n * stride);
        encode_rows(model_->kernels_, mix, joined.data(), static_cast<int>(n), acts_.get());
        model_->kernels_.matmul(mix, acts_.get(), static_cast<int>(n), 0, mix.blocks, mixed_.get(), mix.out_padded());
        for (size_t i = 0; i < n && selects; ++i)
            for (size_t k = 0; k < wide; ++k) reads[i * wide + k] = times(before_[i * wide + k], mixed_.get()[i * stride + k]);
        for (size_t i = 0; i < n && !selects; ++i) {
            const auto mixed = [&](size_t part, size_t k) {
                return static_cast<double>(mixed_.get()[i * stride + part * wide + k]) +
                       static_cast<double>(markov_->mix_bias[part * wide + k]);
            };
            const auto tangent = [](double x) { return 2.0 * logistic(2.0 * x) - 1.0; };
            for (size_t k = 0; k < wide; ++k) {
                const size_t at = i * wide + k;
                const double gate = logistic(mixed(0, k));
                reads[at] = static_cast<float>(recurrent ? tangent(mixed(2, k)) : gate * static_cast<double>(before_[at]));
                if (recurrent) left_[at] = static_cast<float>(gate * static_cast<double>(left_[at]) + (1.0 - gate) * tangent(mixed(1, k)));
            }
        }
    }
    encode_rows(model_->kernels_, after, reads.data(), static_cast<int>(n), acts_.get());
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

struct Parallel::Row {
    const Ask* ask;
    size_t first;  // place of its first slot
    int most;      // children of a node
    Growth growth;
    std::vector<int> expanded{-1};           // whose children come next
    std::vector<std::vector<float>> left{};  // what the slots have left after the pending token, then after each entry

    const std::vector<float>& left_before(int node) const {
        const int parent = growth.node(node).parent;
        return left[parent < 0 ? 0 : static_cast<size_t>(growth.node(parent).entry) + 1];
    }
};

struct Parallel::Slot {
    size_t row;
    int node;   // of it; -1: the pending token
    int index;  // within the block's slots
};

// The children of nodes, at most kChunk.
std::vector<std::vector<RankedToken>> Parallel::decide(std::vector<Row>& rows, const std::vector<Slot>& slots) {
    Model& m = *model_;
    const int count = static_cast<int>(slots.size());
    const size_t wide = static_cast<size_t>(rank());
    std::vector<Ranking::Row> ranked;
    std::vector<int32_t> tokens;
    std::vector<size_t> places;
    std::vector<const float*> states;
    bool filters = false;
    left_.clear();
    for (const Slot& slot : slots) {
        const Row& row = rows[slot.row];
        Sampling sampling = row.ask->sampling;
        sampling.index += static_cast<uint32_t>(slot.index);
        filters = filters || sampling.filters();
        ranked.push_back({sampling, row.most, kShared, !confidence_ || row.most > 1});
        tokens.push_back(slot.node < 0 ? row.ask->anchor : row.growth.node(slot.node).token);
        places.push_back(row.first + static_cast<size_t>(slot.index));
        states.push_back(normed_.data() + places.back() * static_cast<size_t>(m.hidden()));
        const std::vector<float> nothing(wide, 0.0f);
        const std::vector<float>& left = slot.node < 0 || !markov_ ? nothing : row.left_before(slot.node);
        left_.insert(left_.end(), left.begin(), left.end());
    }
    if (markov_) {
        encode(tokens, states);
        for (size_t i = 0; i < slots.size(); ++i) {
            std::vector<std::vector<float>>& left = rows[slots[i].row].left;
            const Row& row = rows[slots[i].row];
            const size_t entry = slots[i].node < 0 ? 0 : static_cast<size_t>(row.growth.node(slots[i].node).entry) + 1;
            left.resize(std::max(left.size(), entry + 1));
            left[entry].assign(
                left_.begin() + static_cast<std::ptrdiff_t>(i * wide), left_.begin() + static_cast<std::ptrdiff_t>((i + 1) * wide));
        }
    }
    const size_t stride = static_cast<size_t>(stride_);
    const bool whole = markov_ && filters;
    if (whole) biased_.need(slots.size() * stride);
    ranking_.begin(ranked);
    const auto consider = [&](Seat& me, int stretch) {
        const int from = ranking_.begin_of(stretch), size = ranking_.size_of(stretch);
        float* y = m.scratch_.pair[static_cast<size_t>(me.id)].get();  // [count][kStretch]
        if (markov_) stretch_product(m.kernels_, markov_->after, acts_.get(), count, stretch, y);
        for (int i = 0; i < count; ++i) {
            float* x = logits_of(places[static_cast<size_t>(i)]) + from;
            if (markov_) {
                m.kernels_.add(y + i * kStretch, x, size);
                x = y + i * kStretch;
                if (whole) std::copy(x, x + size, biased_.get() + static_cast<size_t>(i) * stride + from);
            }
            ranking_.consider(me.id, i, stretch, x, m.kernels_);
        }
    };
    m.runtime_->pool().run([&](Seat& me) {
        const Part part = me.of(ranking_.stretches());
        for (int stretch = part.begin; stretch < part.end; ++stretch) consider(me, stretch);
    }, Pool::kDrafting, static_cast<double>(markov_ ? markov_->after.bytes() : logits_.size()));
    std::vector<std::vector<RankedToken>> children;
    for (size_t i = 0; i < slots.size(); ++i) {
        const float* logits = whole ? biased_.get() + i * stride : markov_ ? nullptr : logits_of(places[i]);
        std::vector<RankedToken>& found = children.emplace_back(ranking_.best(static_cast<int>(i), logits, m.kernels_));
        if (confidence_ && ranked[i].sampling.temperature <= 0.0) {
            // The head knows how likely the likeliest is; the others share the rest as they do by themselves.
            const double sure = static_cast<double>(accepted(places[i], i)), own = found[0].share;
            for (RankedToken& child : found) child.share = own < 1.0 ? child.share * (1.0 - sure) / (1.0 - own) : 0.0;
            found[0].share = sure;
        }
        for (RankedToken& child : found) {
            if (!std::isfinite(child.share)) throw NotFinite();
            child.share = std::clamp(child.share, 0.0, 1.0);
        }
    }
    return children;
}

std::vector<Draft> Parallel::draft(const std::vector<Ask>& asks) {
    std::lock_guard<std::mutex> lock(model_->lock());
    forward(asks);
    std::vector<Row> rows;
    size_t first = 0;
    for (const Ask& ask : asks) {
        const bool tree = ask.branch > 1;
        const int most = tree ? std::min(ask.nodes, kMostChildren) : 1;
        rows.push_back({&ask, first, most, Growth(tree ? ask.nodes : ask.slots, ask.slots, most, 0.0)});
        first += static_cast<size_t>(ask.slots);
    }
    for (int s = 0; s < slots(); ++s) {
        // Without a Markov head a slot says the same after every node.
        std::vector<Slot> all;
        for (size_t r = 0; r < rows.size(); ++r)
            for (const int node : rows[r].expanded)
                if (markov_ || node == rows[r].expanded.front()) all.push_back({r, node, s});
        std::vector<std::vector<RankedToken>> children;
        for (size_t from = 0; from < all.size(); from += kChunk) {
            const auto begin = all.begin() + static_cast<std::ptrdiff_t>(from);
            const std::vector<Slot> together(begin, begin + static_cast<std::ptrdiff_t>(std::min<size_t>(kChunk, all.size() - from)));
            for (std::vector<RankedToken>& each : decide(rows, together)) children.push_back(std::move(each));
        }
        size_t next = 0;
        for (Row& row : rows) {
            if (row.expanded.empty()) continue;
            std::vector<std::vector<RankedToken>> own;
            for (size_t k = 0; k < row.expanded.size(); ++k) own.push_back(children[markov_ ? next++ : next]);
            if (!markov_) ++next;
            row.growth.grow(own);
            row.expanded = row.growth.expand();
        }
    }
    std::vector<Draft> drafts(rows.size());
    for (size_t i = 0; i < rows.size(); ++i)
        for (const Growth::Node& node : rows[i].growth.likeliest()) drafts[i].add(node.token, node.parent, node.chance);
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

std::vector<float> Parallel::bias(
    const std::vector<int32_t>& tokens, const float* states, std::vector<float>& left, std::vector<float>& known) {
    if (!markov_) throw std::invalid_argument("this drafter has no Markov head");
    for (const int32_t token : tokens) check_token(token);
    std::lock_guard<std::mutex> lock(model_->lock());
    const DenormalsAsZero mode;
    const Matrix& m = markov_->after;
    const size_t wide = static_cast<size_t>(rank()), hidden = static_cast<size_t>(model_->hidden());
    std::vector<float> after, padded(kChunk * static_cast<size_t>(m.out_padded()));
    for (size_t first = 0; first < tokens.size(); first += kChunk) {
        const size_t n = std::min<size_t>(kChunk, tokens.size() - first);
        std::vector<const float*> each;
        for (size_t i = first; i < first + n; ++i) each.push_back(states + i * hidden);
        left_.assign(left.data() + first * wide, left.data() + (first + n) * wide);
        encode({tokens.begin() + static_cast<std::ptrdiff_t>(first), tokens.begin() + static_cast<std::ptrdiff_t>(first + n)}, each);
        std::copy(left_.begin(), left_.end(), left.begin() + static_cast<std::ptrdiff_t>(first * wide));
        known.insert(known.end(), before_.begin(), before_.end());
        model_->kernels_.matmul(m, acts_.get(), static_cast<int>(n), 0, m.blocks, padded.data(), m.out_padded());
        for (const float* y = padded.data(); y < padded.data() + n * static_cast<size_t>(m.out_padded()); y += m.out_padded())
            after.insert(after.end(), y, y + m.rows);
    }
    return after;
}

}  // namespace outpace
