// One forward: one parallel region a chunk of tokens.
//
// Threads split tokens, heads or output rows, never a sum. Between two phases that hand data from thread to thread
// stands a barrier; a thread that is dismissed there leaves at once (see pool.h).
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "model/run.h"

namespace outpace {

// What enters a layer that only drafts, of its token's embedding and the batch's features.
bool Model::Run::join(Seat& me, const Layer& l) {
    const Part part = tokens(me);
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    for (int t = part.begin; t < part.end; ++t) {
        m_.embed(&token(t).id, 1, line);
        k_.rmsnorm(line, l.embed_norm.data(), c_.eps, c_.hidden, line);
        const float* features = batch_.features + static_cast<size_t>(first_ + t) * static_cast<size_t>(c_.hidden);
        k_.rmsnorm(features, l.features_norm.data(), c_.eps, c_.hidden, line + c_.hidden);
        encode_line(me, 2 * c_.hidden, n_, t, {&l.join});
    }
    if (!solo_ && !meet(me)) return false;
    share(me, kClaimJoin, 0, l.join.blocks, [&](int begin, int end) {
        k_.matmul(l.join, s_.in[static_cast<size_t>(mine(me))].get(l.join.acts()), n_, begin, end, s_.y.get(), l.join.out_padded());
    });
    return meet(me);
}

void Model::Run::begin_layer(const Seat& me, const Layer& l, int index) {
    const Part part = tokens(me);
    for (int t = part.begin; t < part.end; ++t) {
        enter(me, t, index);
        if (!l.mixes())
            encode_fed(me, t, l);
        else if (l.attn_conv.taps > 0)
            encode_kept(me, t, l.attn_norm, l.attn_conv);
        else if (l.embed_norm.empty() || l.join.data)
            encode_normed(me, t, n_, t, l.attn_norm,
                {l.latent.q_down.data ? &l.latent.q_down : &l.q, &l.k, &l.v, &l.delta.qkv, &l.delta.z, &l.delta.b, &l.delta.a, &l.conv.in});
        else
            encode_joined(me, t, l);
    }
}

// What a layer leaves in the cache, and no more: of tokens whose output nobody reads.
bool Model::Run::store(Seat& me, int index) {
    const Layer& l = m_.weights_->layers[static_cast<size_t>(index)];
    if (l.join.data && !join(me, l)) return false;
    begin_layer(me, l, index);
    if (!solo_ && !meet(me)) return false;
    products(me, index, {{&l.k, s_.k.get()}, {&l.v, s_.v.get()}});
    if (!meet(me)) return false;
    if (l.latent.rank > 0) {
        const Part part = me.of(n_);
        for (int t = part.begin; t < part.end; ++t) store_latent(me, l, index, t);
        return true;
    }
    rope(me, l, index, c_.heads);
    return true;
}

bool Model::Run::layer(Seat& me, int index) {
    const Layer& l = m_.weights_->layers[static_cast<size_t>(index)];
    if (l.join.data && !join(me, l)) return false;
    begin_layer(me, l, index);
    if (!solo_ && !meet(me)) return false;
    clock(me, kNorm);
    if (!l.mixes()) return feed(me, l, index);

    if (l.recurs()) {
        if (!(l.conv.taps > 0 ? short_conv(me, l, index) : recurrence(me, l, index)) || !meet(me)) return false;
        clock(me, kAttention);
        // No barrier: attention writes over this product's inputs behind the barriers that it has itself.
        if (l.attends()) output(me, kClaimBesideOutput, index, l.delta.o, s_.beside);
    }
    if (l.attn_conv.taps > 0 && !convolve_inputs(me, l.attn_conv, kClaimJoin, index, {&l.q, &l.k, &l.v})) return false;
    if (l.attends()) {
        if (!(l.latent.rank > 0 ? latent(me, l, index) : attend(me, l, index)) || !meet(me)) return false;
        clock(me, kAttention);
    }
    output(me, kClaimOutput, index, l.o, s_.y);
    if (!meet(me)) return false;
    clock(me, kOutput);
    if (!l.feeds()) return true;

    const Part part = tokens(me);  // the team may be another one by now
    for (int t = part.begin; t < part.end; ++t) {
        add_back(me, t, l.post_attn_norm, l.o_bias, made_of_tokens(me, t, l));
        encode_fed(me, t, l);
    }
    if (!solo_ && !meet(me)) return false;
    clock(me, kNorm2);
    return feed(me, l, index);
}

bool Model::Run::feed(Seat& me, const Layer& l, int index) {
    if (l.ffn_conv.taps > 0 && !convolve_inputs(me, l.ffn_conv, kClaimInputGate, index, {&l.gate, &l.up})) return false;
    if (!(l.experts.count > 0 ? mixture(me, l, index) : feed_forward(me, l, index))) return false;
    return !l.input.gate.data || add_input(me, l, index);
}

bool Model::Run::feed_forward(Seat& me, const Layer& l, int index) {
    gate_up(me, l, index);
    if (!meet(me)) return false;
    clock(me, kGateUp);

    down(me, l, index);
    if (!meet(me)) return false;
    clock(me, kDown);
    return true;
}

// Tokens' inputs for all layers, of their ids and of what enters the first one, which reads them many barriers later.
bool Model::Run::inputs(Seat& me) {
    const LayerInputs& in = m_.weights_->inputs;
    const Part own = tokens(me);
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    for (int t = own.begin; t < own.end; ++t) {
        enter(me, t, 0);
        std::memcpy(line, x(me, t), static_cast<size_t>(c_.hidden) * 4);
        encode_line(me, c_.hidden, n_, t, {&in.project});
    }
    if (!solo_ && !meet(me)) return false;
    share(me, kClaimJoin, 0, in.project.blocks, [&](int begin, int end) {
        const uint8_t* acts = s_.in[static_cast<size_t>(mine(me))].get(in.project.acts());
        k_.matmul(in.project, acts, n_, begin, end, s_.inputs.get(), in.project.out_padded());
    });
    if (!meet(me)) return false;

    const float of_table = std::sqrt(static_cast<float>(in.width)), of_both = 1.0f / std::sqrt(2.0f);
    const float of_product = 1.0f / std::sqrt(static_cast<float>(c_.hidden));
    const Part part = me.of(n_);
    for (int t = part.begin; t < part.end; ++t) {
        float* made = input_of(t);
        unpack_row(in.table, token(t).id, line);
        for (int first = 0; first < in.table.cols; first += in.width) {
            for (int i = first; i < first + in.width; ++i) made[i] = times(made[i], of_product);
            k_.rmsnorm(made + first, in.norm.data(), c_.eps, in.width, made + first);
        }
        for (int i = 0; i < in.table.cols; ++i) made[i] = times(made[i] + times(line[i], of_table), of_both);
    }
    return true;
}

// What a layer adds behind its feed-forward, of the tokens' inputs for it.
bool Model::Run::add_input(Seat& me, const Layer& l, int index) {
    const Matrix &gate = l.input.gate, &project = l.input.project;
    const LayerInputs& in = m_.weights_->inputs;
    const Part part = tokens(me);
    for (int t = part.begin; t < part.end; ++t) {
        add_made(me, t, l);
        std::memcpy(s_.line[static_cast<size_t>(me.id)].get(), x(me, t), static_cast<size_t>(c_.hidden) * 4);
        encode_line(me, c_.hidden, n_, t, {&gate});
    }
    if (!solo_ && !meet(me)) return false;

    constexpr int unit = kGroup / kRows;  // row blocks that make one group of the next product's inputs
    const int groups = (in.width + kGroup - 1) / kGroup;
    uint8_t* middle = s_.middle.get(project.acts());
    float* values = s_.pair[static_cast<size_t>(me.id)].get();
    share(me, kClaimInputGate, index, groups, [&](int from, int to) {
        const uint8_t* acts = s_.in[static_cast<size_t>(mine(me))].get(gate.acts());
        for (int group = from; group < to; ++group) {
            const int first = group * kGroup, filled = std::min(kGroup, in.width - first);
            // The kernels write at row block * 16: shift the origin so that this stretch starts at the buffer's own.
            k_.matmul(gate, acts, n_, group * unit, std::min(group * unit + unit, gate.blocks), values - first, kGroup);
            for (int t = 0; t < n_; ++t) {
                float *own = values + t * kGroup, given[kGroup] = {};
                std::copy_n(input_of(t) + static_cast<size_t>(index) * static_cast<size_t>(in.width) + first, filled, given);
                k_.gate(c_.activation, own, given, kGroup, own);
                std::fill(own + filled, own + kGroup, 0.0f);
                k_.encode(project.acts(), own, group, group + 1, middle, n_, t);
            }
        }
    });
    if (me.rank == 0) {  // inputs that only pad the next product
        const float nothing[kGroup] = {};
        for (int group = groups; group < project.groups; ++group)
            for (int t = 0; t < n_; ++t) k_.encode(project.acts(), nothing, group, group + 1, middle, n_, t);
    }
    if (!meet(me)) return false;

    share(me, kClaimInputProject, index, project.blocks,
        [&](int begin, int end) { k_.matmul(project, middle, n_, begin, end, s_.y.get(), project.out_padded()); });
    if (!meet(me)) return false;
    clock(me, kDown);
    return true;
}

// Queries, keys and values; the cache's new ones; attention, encoded for the product behind it.
bool Model::Run::attend(Seat& me, const Layer& l, int index) {
    products(me, index, {{&l.q, s_.q.get()}, {&l.k, s_.k.get()}, {&l.v, s_.v.get()}}, l.recurs() ? kClaimBeside : kClaimQkv);
    if (me.rank < static_cast<int>(m_.split_of(index).jobs.size())) {  // likely first keys and values come while it waits and rotates
        const uint8_t* keys = first_keys(me.rank, index);
        for (size_t line = 0; line < m_.keys().pair(m_.places_[static_cast<size_t>(index)]); line += 64)
            __builtin_prefetch(keys + line, 0, 2);
    }
    if (!meet(me)) return false;
    clock(me, kQkv);

    rope(me, l, index, 0);
    if (!meet(me)) return false;
    clock(me, kRope);

    return attention(me, l, index);
}

void Model::Run::gate_up(const Seat& me, const Layer& l, int index) {
    constexpr int blocks = kGateRows / kRows;
    constexpr int unit = kGroup / kRows;  // row blocks that make one group of the next product's inputs
    const uint8_t* gate_acts = l.gate.data ? s_.in[static_cast<size_t>(mine(me))].get(l.gate.acts()) : nullptr;
    const uint8_t* up_acts = s_.in[static_cast<size_t>(mine(me))].get(l.up.acts());
    uint8_t* middle = s_.middle.get(l.down.acts());
    float* g = s_.pair[static_cast<size_t>(me.id)].get();
    float* u = g + static_cast<size_t>(kGateRows) * n_;
    share(me, kClaimGateUp, index, l.up.blocks / unit, [&](int from, int to) {
        for (int begin = from * unit; begin < to * unit; begin += blocks) {
            const int end = std::min(begin + blocks, to * unit);
            // The kernels write at row block * 16: shift the origin so that this stretch starts at the buffer's own.
            if (l.gate.data) k_.matmul(l.gate, gate_acts, n_, begin, end, g - begin * kRows, kGateRows);
            k_.matmul(l.up, up_acts, n_, begin, end, u - begin * kRows, kGateRows);
            const int rows = (end - begin) * kRows, group = begin / unit;
            for (int t = 0; t < n_; ++t) {
                float *values = g + t * kGateRows, *up = u + t * kGateRows;
                k_.gate(c_.activation, l.gate.data ? values : up, up, rows, values);
                k_.encode(l.down.acts(), values, group, std::min(group + rows / kGroup, l.down.groups), middle, n_, t);
            }
        }
    });
    if (me.rank == 0 && l.up.blocks / unit < l.down.groups) {  // inputs that only pad the next product
        float* line = s_.line[0].get();
        const int from = l.up.blocks / unit;
        std::fill(line, line + (l.down.groups - from) * kGroup, 0.0f);
        for (int t = 0; t < n_; ++t) k_.encode(l.down.acts(), line, from, l.down.groups, middle, n_, t);
    }
}

namespace {

// Ties go to the lower id, whatever order stretches come in.
void keep_better(Best& best, const Best& other) {
    best.nan = best.nan || other.nan;
    if (other.value > best.value || (other.value == best.value && other.index < best.index)) {
        best.value = other.value;
        best.index = other.index;
    }
}

}  // namespace

// The last layer's outputs; those that are wanted are normed and encoded for the head.
bool Model::Run::end_layers(Seat& me) {
    const int l = batch_.layers, wanted = static_cast<int>(wanted_.size());
    const Part part = tokens(me);
    int at = 0;
    for (int t = 0; t < n_; ++t) {
        const bool is_wanted = at < wanted && wanted_[static_cast<size_t>(at)] == t;
        if (t >= part.begin && t < part.end) {
            enter(me, t, l);
            if (is_wanted) encode_normed(me, t, wanted, at, m_.weights_->final_norm, {&m_.weights_->head});
        }
        at += is_wanted;
    }
    return solo_ || meet(me);
}

void Model::Run::forward(Seat& me) {
    if (!layers(me)) return;
    const int wanted = static_cast<int>(wanted_.size());
    if (wanted > 0) {
        const Matrix& head = m_.weights_->head;
        const size_t stride = static_cast<size_t>(result_.stride_);
        float* y = result_.logits_->get() + static_cast<size_t>(token(wanted_[0]).wanted) * stride;
        Best* bests = s_.bests.data() + static_cast<size_t>(me.rank) * kChunk;
        std::fill(bests, bests + wanted, Best{-INFINITY, 0, false});
        share(me, kClaimQkv, batch_.layers, head.blocks, [&](int from, int to) {
            k_.matmul(head, s_.in[static_cast<size_t>(mine(me))].get(head.acts()), wanted, from, to, y, result_.stride_);
            const int begin = from * kRows, end = std::min(to * kRows, c_.outputs);
            for (int i = 0; begin < end && i < wanted; ++i) {
                if (c_.logit_cap > 0.0f) k_.cap(y + static_cast<size_t>(i) * stride + begin, (to - from) * kRows, c_.logit_cap);
                Best found = k_.argmax(y + static_cast<size_t>(i) * stride + begin, end - begin);
                found.index += begin;
                keep_better(bests[i], found);
            }
        });
    }
    clock(me, kHead);
}

void Model::Run::settle(int threads) {
    for (size_t i = 0; i < wanted_.size(); ++i) {
        Best best = s_.bests[i];
        for (int rank = 1; rank < threads; ++rank) keep_better(best, s_.bests[static_cast<size_t>(rank) * kChunk + i]);
        result_.best[static_cast<size_t>(token(wanted_[i]).wanted)] = best;
    }
}

std::unique_ptr<Result> Model::forward(const BatchView& batch) {
    auto result = std::make_unique<Result>();
    if (batch.tokens == 0) throw std::invalid_argument("malformed batch: it has no tokens");
    const Settled settled{kv_};
    prepare(batch);
    Pool& pool = runtime_->pool();
    result->kernels = &kernels_;
    result->runtime = runtime_;
    result->vocab = weights_->config.outputs;
    result->hidden = weights_->config.hidden;
    result->tokens = batch.tokens;
    result->hidden_count = static_cast<int>(batch.hidden_layers.size());
    for (int b = 0; b < batch.rows && !batch.hidden_layers.empty(); ++b)
        for (int i = batch.starts[b]; i < batch.starts[b + 1]; ++i)
            result->hidden_place.push_back(batch.hidden_rows && !batch.hidden_rows[b] ? -1 : result->hidden_tokens++);
    result->hidden_states.reset(
        new float[static_cast<size_t>(result->hidden_tokens) * batch.hidden_layers.size() * static_cast<size_t>(weights_->config.hidden)]);
    result->wanted.assign(batch.wanted, batch.wanted + batch.wanted_count);
    result->best.resize(static_cast<size_t>(batch.wanted_count));
    result->stride_ = weights_->head.out_padded();
    result->logits_ = logits_pool_.take(static_cast<size_t>(batch.wanted_count) * static_cast<size_t>(result->stride_));
    for (int first = 0, count; first < batch.tokens; first += count) {
        count = pass(batch, first);
        unsigned kind = 0;  // widths up to 1, 2, 4 ...
        while (1 << kind < count) ++kind;
        if (beside_) kind = Pool::kDrafting;
        plan_jobs(first, count, pool.team(kind));
        begin_pass(batch, first, count);
        Run run(*this, pool, *result, batch, first, count);
        const size_t read = weights_->bytes() - weights_->inputs.table.bytes();  // of which tokens have a row each
        result->threads = pool.run([&run](Seat& me) { run.forward(me); }, kind, static_cast<double>(read));
        run.settle(result->threads);
        end_pass();
    }
    const auto mixes = [](const Layer& l) { return l.experts.count > 0; };
    const auto mixtures = std::count_if(weights_->layers.begin(), weights_->layers.begin() + batch.layers, mixes);
    if (mixtures) result->experts = static_cast<double>(result->read_) / static_cast<double>(mixtures);
    for (int b = 0; b < batch.rows && !beside_; ++b) kv_.lengthen(batch.row[batch.starts[b]], batch.starts[b + 1] - batch.starts[b]);
    return result;
}

}  // namespace outpace
