#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels/functions.h"

namespace outpace {

const char* const kPhaseNames[kPhases] = {"norm", "qkv", "rope", "attention", "output", "norm2", "gate_up", "down", "head"};

void Rope::cover(int positions) {
    if (positions <= covered_) return;
    const int target = std::max(positions, std::min(2 * covered_, covered_ + 4096));
    cos_.reserve(static_cast<size_t>(target) * half());
    sin_.reserve(static_cast<size_t>(target) * half());
    for (int p = covered_; p < target; ++p) {
        for (const float frequency : table_.frequencies) {
            // The angle is rounded to float32 as in the models' training code; its cosine is exact to float32.
            const float angle = static_cast<float>(p) * frequency;
            double cosine, sine;
            circle(static_cast<double>(angle), &cosine, &sine);
            cos_.push_back(static_cast<float>(cosine) * table_.scale);
            sin_.push_back(static_cast<float>(sine) * table_.scale);
        }
        if (table_.growth > 0.0f)
            growth_.push_back(static_cast<float>(1.0 + static_cast<double>(table_.growth) * natural_log(1.0 + p / table_.period)));
    }
    covered_ = target;
}

int Result::find(int32_t packed) const {
    const auto at = std::lower_bound(wanted.begin(), wanted.end(), packed);
    if (at == wanted.end() || *at != packed)
        throw std::out_of_range("packed index " + std::to_string(packed) + " was not wanted, so it has no logits");
    return static_cast<int>(at - wanted.begin());
}

std::unique_ptr<Result> Result::of(const float* logits, int vocab, std::vector<int32_t> wanted, const Kernels& kernels) {
    auto result = std::make_unique<Result>();
    const size_t size = wanted.size() * static_cast<size_t>(vocab);
    result->vocab = vocab;
    result->stride_ = vocab;
    result->kernels = &kernels;
    result->logits_ = std::make_shared<Buffer<float>>(size);
    std::copy(logits, logits + size, result->logits_->get());
    for (size_t i = 0; i < wanted.size(); ++i) result->best.push_back(kernels.argmax(result->logits(static_cast<int>(i)), vocab));
    result->wanted = std::move(wanted);
    return result;
}

namespace {

StateShape states_of(const Weights& weights) {
    StateShape shape;
    for (const Layer& l : weights.layers)
        if (const DeltaNet& d = l.delta; d.key_heads > 0)
            shape = {shape.layers + 1, d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.taps, 0};
        else if (l.conv.taps > 0)
            shape = {shape.layers + 1, 0, 0, 0, 0, l.conv.taps, weights.config.hidden};
    return shape;
}

// Layers with a window have blocks of their own, unless another one that sees more reads them, or no row is longer.
KVShape keys_of(const Weights& weights, KVType type, bool windowed) {
    const auto seen = [&](const Layer& l) { return windowed && l.window > 0 && l.window < weights.config.max_length ? l.window : 0; };
    std::vector<int> windows;
    for (const Layer& l : weights.layers) {
        windows.push_back(seen(l));
        if (l.shares < 0) continue;
        int& shared = windows[static_cast<size_t>(l.shares)];
        shared = shared > 0 && seen(l) > 0 ? std::max(shared, seen(l)) : 0;
    }
    KVShape shape{type};
    for (size_t i = 0; i < weights.layers.size(); ++i)
        if (const Layer& l = weights.layers[i]; l.attends() && l.shares < 0) shape.add(l.kv_heads, l.head_dim, l.value_dim(), windows[i]);
    return shape;
}

// Heads are computed in so many groups, each of heads that share a KV head, no more than a job can have.
int groups_of(int heads, int kv_heads) {
    int n = kv_heads;
    while (heads % n != 0 || heads / n > kMaxQueries) n += kv_heads;
    return n;
}

}  // namespace

Model::Model(std::shared_ptr<const Weights> weights, std::shared_ptr<Runtime> runtime, const Kernels& kernels, KVType kv_type,
    int64_t kv_limit, bool windowed, std::shared_ptr<Model> beside)
    : weights_(std::move(weights)),
      beside_(std::move(beside)),
      runtime_(std::move(runtime)),
      kernels_(kernels),
      scratch_(runtime_->scratch()),
      kv_(keys_of(*weights_, kv_type, windowed), kv_limit, states_of(*weights_)),
      routes_(static_cast<size_t>(runtime_->threads())),
      next_job_(weights_->layers.size()),
      next_head_(weights_->layers.size()),
      claimed_((weights_->layers.size() + 1) * kClaims) {
    if (weights_->config.beside != (beside_ != nullptr)) throw std::invalid_argument("which model this one is beside must be said, or not");
    for (const RopeTable& table : weights_->ropes) ropes_.emplace_back(table);
    int attend = 0, recur = 0;
    for (const Layer& l : weights_->layers) {
        if (beside_) {
            places_.push_back(beside_->place_for(l));
            split_of_.push_back(split_for(l.kv_heads, round_up(l.value_dim(), 16) + 16));
            continue;
        }
        const bool shares = l.attends() && l.shares >= 0;
        places_.push_back(!l.attends() ? -1 : shares ? places_[static_cast<size_t>(l.shares)] : attend++);
        state_places_.push_back(l.recurs() ? recur++ : -1);
        split_of_.push_back(l.attends() ? split_for(l.kv_heads, round_up(l.value_dim(), 16) + 16) : 0);
    }
    if (const int dim = kv_.states().shape().key_dim; dim > 0) {
        key_scale_.assign(static_cast<size_t>(dim), 1.0f / std::sqrt(static_cast<float>(dim)));
        query_scale_.assign(static_cast<size_t>(dim), 1.0f / static_cast<float>(dim));
    }
    std::lock_guard<std::mutex> lock(runtime_->lock());
    fit_scratch();
}

// Where the keys and values lie that a layer of a model beside this one reads.
int Model::place_for(const Layer& l) const {
    const std::vector<Layer>& layers = weights_->layers;
    const Layer* from = l.shares < static_cast<int>(layers.size()) ? &layers[static_cast<size_t>(l.shares)] : nullptr;
    if (!from || !from->attends() || from->latent.rank > 0 || from->kv_heads != l.kv_heads || from->head_dim != l.head_dim)
        throw std::invalid_argument("a layer reads keys and values that do not fit it");
    return places_[static_cast<size_t>(l.shares)];
}

// Which of the splits is for such heads.
int Model::split_for(int kv_heads, int record) {
    const auto same = [&](const Split& split) { return split.kv_heads == kv_heads && split.record == record; };
    const auto found = std::find_if(splits_.begin(), splits_.end(), same);
    const int at = static_cast<int>(found - splits_.begin());
    if (found == splits_.end()) splits_.push_back({kv_heads, groups_of(weights_->config.heads, kv_heads), record});
    return at;
}

// Makes the runtime's working memory large enough for this model.
void Model::fit_scratch() {
    Scratch& s = scratch_;
    const auto chunk = [](int floats) { return static_cast<size_t>(kChunk) * static_cast<size_t>(floats); };
    int heads = 0, values = 0, hidden = round_up(weights_->config.hidden, 64), inner = 0;
    const auto input = [&](const Matrix& m) {
        hidden = std::max(hidden, m.in_padded());
        s.need_in(m);
    };
    input(weights_->head);
    for (const Layer& l : weights_->layers) {
        for (const Matrix* m :
            {&l.latent.q_down, &l.q, &l.k, &l.v, &l.gate, &l.up, &l.experts.router, &l.experts.gate, &l.experts.up, &l.delta.qkv,
                &l.delta.z, &l.delta.b, &l.delta.a, &l.conv.in, &l.join, &l.input.gate, &l.attn_conv.project, &l.ffn_conv.project})
            if (m->data) input(*m);
        if (const Experts& e = l.experts; e.count > 0) {
            const size_t pairs = static_cast<size_t>(kChunk) * static_cast<size_t>(e.used);
            s.router.need(chunk(e.router.out_padded()));
            s.pairs_in.need(e.down.acts(), e.down.groups, static_cast<int>(pairs));
            s.pairs.need(pairs * static_cast<size_t>(e.down.out_padded() / e.count));
            if (!e.norm.empty()) {
                s.need_in(e.router, s.router_in);
                for (const Matrix* m : {&e.gate, &e.up})
                    if (m->data) s.need_in(*m, s.expert_in);
                inner = std::max(inner, 2 * round_up(weights_->config.hidden, 64));  // two lines; see mixed
            }
            for (ActBuffer& gathered : s.gathered)
                for (const Matrix* m : {&e.gate, &e.up})
                    if (m->data) gathered.need(m->acts(), m->groups, kGather);
        }
        if (l.attends()) {
            heads = std::max(heads, weights_->config.heads * round_up(l.head_dim, 16));
            values = std::max(values, weights_->config.heads * round_up(l.value_dim(), 16));
            inner = std::max(inner, round_up(l.head_dim, 16));
        }
        for (const Matrix* m : {&l.latent.k_up, &l.latent.v_up})
            if (m->data) s.latents.need(m->acts(), weights_->config.heads * m->groups), inner = std::max(inner, m->in_padded());
        for (const Matrix* m : {&l.o, &l.delta.o})
            if (m->data) s.heads.need(m->acts(), m->groups), inner = std::max(inner, m->in_padded());
        s.beside.need(chunk(l.delta.o.out_padded()));
        for (const Matrix* m : {&l.down, &l.input.project})
            if (m->data) s.middle.need(m->acts(), m->groups);
        s.q.need(chunk(std::max({l.q.out_padded(), l.latent.v_up.out_padded(), l.delta.qkv.out_padded(), l.conv.in.out_padded()})));
        s.k.need(chunk(std::max(l.k.out_padded(), l.delta.z.out_padded())));
        s.v.need(chunk(std::max(l.v.out_padded(), l.delta.b.out_padded())));
        s.a.need(chunk(std::max(
            {l.delta.a.out_padded(), l.latent.q_down.out_padded(), l.attn_conv.project.out_padded(), l.ffn_conv.project.out_padded()})));
        if (l.attn_conv.taps > 0) s.convolved.need(chunk(weights_->config.hidden));
        s.y.need(chunk(std::max({l.o.out_padded(), l.down.out_padded(), l.join.out_padded(), l.input.project.out_padded()})));
        inner = std::max(inner, l.down.in_padded());
    }
    if (const LayerInputs& inputs = weights_->inputs; inputs.width > 0) {
        input(inputs.project);
        s.inputs.need(chunk(inputs.project.out_padded()));
        inner = std::max(inner, inputs.table.cols);
    }
    for (size_t i = 0; i < s.x.size(); ++i) s.x[i].need(i == 0 ? chunk(hidden) : static_cast<size_t>(kSolo) * static_cast<size_t>(hidden));
    for (Buffer<float>& line : s.line) line.need(static_cast<size_t>(std::max(hidden, inner)));
    for (Buffer<float>& pair : s.pair) pair.need(2 * chunk(kGateRows));
    s.rotated.need(chunk(heads));
    s.attended.need(chunk(values));
    if (const StateShape& states = kv_.states().shape(); states.layers > 0) {
        s.attended.need(chunk(states.values()));
        s.convolved.need(chunk(states.channels()));
        s.rates.need(chunk(2 * states.value_heads));
        s.zeros.need(static_cast<size_t>(states.key_dim) * kStateColumns);
    }
    hidden_stride_ = hidden;
}

std::array<double, kPhases> Model::take_timings() {
    const auto taken = seconds_;
    seconds_.fill(0.0);
    return taken;
}

}  // namespace outpace
