#include "model/weights.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace outpace {
namespace {

void fits(const Matrix& m, int rows, int cols, const char* name) {
    if (m.rows != rows || m.cols != cols || !m.data)
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(m.rows) + " x " + std::to_string(m.cols) + ", expected " +
                                    std::to_string(rows) + " x " + std::to_string(cols));
}
void fits(const std::vector<float>& v, int n, bool required, const char* name) {
    if ((required || !v.empty()) && static_cast<int>(v.size()) != n)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(v.size()) + " values, expected " + std::to_string(n));
}

void fits(const Experts& e, const Config& c) {
    constexpr int most = 1 << 14;
    if (e.count < 1 || e.count > most || e.used < 1 || e.used > e.count || e.inner < 1 || e.inner > most * 4 || e.shared < 0 ||
        e.groups < 1 || e.count % e.groups != 0 || e.used_groups < 1 || e.used_groups > e.groups ||
        e.used > e.used_groups * (e.count / e.groups) || !(e.scale > 0) || !(e.least_total >= 0))
        throw std::invalid_argument("a mixture's sizes do not fit together");
    const int inner = e.count * round_up(e.inner, 64);
    fits(e.router, e.router.rows > e.count && e.shared > 0 ? e.count + 1 : e.count, c.hidden, "a router");
    if (c.activation != Activation::Relu) fits(e.gate, inner, c.hidden, "experts' gate matrix");
    fits(e.up, inner, c.hidden, "experts' up matrix");
    fits(e.down, e.count * round_up(c.hidden, 64), e.inner, "experts' down matrix");
    fits(e.router_bias, e.count, false, "a router's bias");
    fits(e.choice_bias, e.count, false, "a bias of a router's choice");
    fits(e.gate_bias, inner, false, "experts' gate bias");
    fits(e.up_bias, inner, false, "experts' up bias");
    fits(e.down_bias, e.count * c.hidden, false, "experts' down bias");
    fits(e.expert_scale, e.count, false, "experts' scales");
    const bool normed = !e.norm.empty();
    for (const std::vector<float>* norm : {&e.router_norm, &e.norm, &e.post_norm, &e.shared_post_norm})
        fits(*norm, c.hidden, normed, "a mixture's norm");
    if (normed && e.shared == 0) throw std::invalid_argument("a mixture with norms has no shared expert");
}

void fits(const DeltaNet& d, const DeltaNet& first, const Layer& l, const Config& c) {
    if (d.key_heads != first.key_heads || d.value_heads != first.value_heads || d.key_dim != first.key_dim ||
        d.value_dim != first.value_dim || d.taps != first.taps)
        throw std::invalid_argument("recurrent layers differ in their sizes");
    if (d.value_heads < 1 || d.value_heads % d.key_heads != 0 || d.key_dim < 16 || d.key_dim % 16 != 0 || d.value_dim < 32 ||
        d.value_dim % 32 != 0 || d.taps < 1 || d.taps > kMostTaps || d.key_heads > 1 << 12 || d.value_heads > 1 << 12 ||
        d.key_dim > 1 << 12 || d.value_dim > 1 << 12)
        throw std::invalid_argument("a recurrent layer's sizes do not fit together");
    const int keys = d.key_heads * d.key_dim, values = d.value_heads * d.value_dim;
    fits(d.qkv, 2 * keys + values, c.hidden, "a matrix of queries, keys and values");
    fits(d.z, values, c.hidden, "a gate's matrix");
    if (!d.scans()) fits(d.b, d.value_heads, c.hidden, "the matrix of updates' rates");
    fits(d.a, d.value_heads, c.hidden, "the matrix of decays");
    const Matrix& o = l.recurrent_output();
    const int real = d.scans() && o.cols % d.value_heads == 0 && o.cols <= values ? o.cols : values;
    fits(o, c.hidden, real, "a recurrent layer's output matrix");
    fits(d.convolution, d.taps * (2 * keys + values), true, "a convolution");
    fits(d.decay, d.value_heads, true, "decays");
    fits(d.dt_bias, d.value_heads, true, "a decay's bias");
    fits(d.norm, d.scans() ? real : d.value_dim, !d.scans(), "a recurrent layer's norm");
    fits(d.skip, d.value_heads, first.scans(), "a state space's skips");
    fits(d.convolution_bias, 2 * keys + values, false, "a convolution's bias");
    if (d.scans() != first.scans() || (d.scans() && d.b.data)) throw std::invalid_argument("recurrent layers differ in their kinds");
}

void fits(const ShortConv& conv, const ShortConv& first, const Layer& l, const Config& c) {
    if (conv.taps != first.taps || conv.taps < 1 || conv.taps > kMostTaps || c.hidden % 16 != 0)
        throw std::invalid_argument("short convolutions' sizes do not fit together");
    fits(conv.in, 3 * c.hidden, c.hidden, "a short convolution's matrix");
    fits(l.o, c.hidden, c.hidden, "a short convolution's output matrix");
    fits(conv.convolution, conv.taps * c.hidden, true, "a convolution");
}

void fits(const LocalConv& conv, const Layer& l, const Config& c) {
    if (conv.taps == 0) return;
    if (conv.taps < 1 || conv.taps > conv.block || conv.group < 1 || c.hidden % conv.group != 0 || !l.mixes() || !l.up.data || l.recurs() ||
        l.latent.rank > 0 || !l.embed_norm.empty())
        throw std::invalid_argument("the sizes of a convolution over a block do not fit together");
    fits(conv.project, 2 * conv.taps * (c.hidden / conv.group), c.hidden, "the matrix of a convolution's kernels");
    fits(conv.base, 2 * conv.taps * c.hidden, true, "a convolution's kernels");
}

void fits(const Latent& a, const Layer& l, const Config& c) {
    const int value = l.o.cols / c.heads;
    if (a.rank % kRows != 0 || a.plain < 1 || a.rotated < 2 || a.rotated % 2 != 0 || value < 1 || value % kRows != 0 || !(a.eps >= 0) ||
        l.kv_heads != 1 || l.head_dim != a.rank + a.rotated || l.shares >= 0 || l.rope < 0 || !l.sinks.empty() || l.gated ||
        !l.q_bias.empty() || !l.k_bias.empty() || !l.v_bias.empty() || !l.v_norm.empty())
        throw std::invalid_argument("the sizes of latent attention do not fit together");
    if (a.q_down.data) fits(a.q_down, l.q.cols, c.hidden, "a matrix of queries' latent vectors");
    fits(l.q_norm, l.q.cols, a.q_down.data != nullptr, "a norm of queries' latent vectors");
    fits(l.q, c.heads * (a.plain + a.rotated), a.q_down.data ? l.q.cols : c.hidden, "a query matrix");
    fits(l.k, l.head_dim, c.hidden, "a matrix of latent vectors");
    fits(l.k_norm, a.rank, true, "a norm of latent vectors");
    fits(a.k_up, c.heads * a.rank, a.plain, "a matrix of keys from latent vectors");
    fits(a.v_up, c.heads * value, a.rank, "a matrix of values from latent vectors");
    fits(l.o, c.hidden, c.heads * value, "an attention output matrix");
}

void fits_heads(const Weights& w, const Layer& l, int index) {
    const Config& c = w.config;
    if (!l.attends()) return;
    if (l.kv_heads <= 0 || c.heads % l.kv_heads != 0 || l.head_dim <= 0 || l.head_dim % 2 != 0 || round_up(l.head_dim, 16) > kMaxHead)
        throw std::invalid_argument("a layer's heads do not fit together");
    if (!l.v.data && l.shares < 0 && static_cast<int>(l.k_norm.size()) > l.head_dim)
        throw std::invalid_argument("a layer whose values are made of its keys' product can have no norm over all of its keys");
    if (c.beside && (l.shares < 0 || l.k.data || l.v.data || l.latent.rank > 0))
        throw std::invalid_argument("a layer of a model beside another has keys and values of its own");
    if (l.shares < 0 || c.beside) return;
    const bool there = l.shares < index && !l.k.data && !l.v.data;
    const Layer* from = there ? &w.layers[static_cast<size_t>(l.shares)] : nullptr;
    if (!from || !from->attends() || from->latent.rank > 0 || from->shares >= 0 || from->kv_heads != l.kv_heads ||
        from->head_dim != l.head_dim)
        throw std::invalid_argument("a layer reads keys and values that do not fit it");
}
void check(const Weights& w) {
    const Config& c = w.config;
    if (c.vocab <= 0 || c.hidden <= 0 || c.heads <= 0 || c.kv_heads <= 0 || c.heads % c.kv_heads != 0 || c.head_dim <= 0 ||
        c.head_dim % 2 != 0 || c.ffn <= 0 || c.max_length <= 0 || c.outputs <= 0 || w.layers.empty())
        throw std::invalid_argument("the model's sizes do not fit together");
    fits(w.embedding, c.vocab, c.hidden, "the embedding");
    fits(w.head, c.outputs, c.hidden, "the output head");
    fits(w.final_norm, c.hidden, true, "the final norm");
    const DeltaNet* recurrent = nullptr;
    const ShortConv* convolved = nullptr;
    bool attends = false;
    for (const Layer& l : w.layers) {
        const int index = static_cast<int>(&l - w.layers.data()), d = l.head_dim, q = c.heads * d, kv = l.kv_heads * d;
        fits_heads(w, l, index);
        const int read = l.embed_norm.empty() || l.join.data ? c.hidden : 2 * c.hidden;
        if (l.join.data) fits(l.join, c.hidden, 2 * c.hidden, "the matrix of an embedding and features");
        fits(l.features_norm, c.hidden, l.join.data != nullptr, "a norm of features");
        if (l.delta.key_heads > 0) {
            if (!recurrent) recurrent = &l.delta;
            fits(l.delta, *recurrent, l, c);
        } else if (l.conv.taps > 0) {
            if (!convolved) convolved = &l.conv;
            fits(l.conv, *convolved, l, c);
        }
        if (l.recurs() && (l.delta.o.data || l.q.data) &&
            (!l.delta.o.data || !l.q.data || !l.delta.scans() || l.latent.rank > 0 || !l.embed_norm.empty()))
            throw std::invalid_argument("attention and what recurs in the same layer do not fit together");
        if (l.latent.rank > 0) {
            attends = true;
            fits(l.latent, l, c);
        } else if (l.q.data || (!l.recurs() && !l.feeds())) {
            attends = true;
            fits(l.q, l.gated ? 2 * q : q, read, "a query matrix");
            if (l.shares < 0) fits(l.k, kv, read, "a key matrix");
            if (l.v.data) fits(l.v, kv, read, "a value matrix");
            fits(l.o, c.hidden, q, "an attention output matrix");
        }
        if (l.gated && (!l.q_bias.empty() || static_cast<int>(l.q_norm.size()) > d || d % 16 != 0))
            throw std::invalid_argument("a layer whose heads are gated can have no bias and no norm over all of its queries");
        const Experts& e = l.experts;
        const bool only_mixes = l.mixes() && !l.gate.data && !l.up.data && !l.down.data;
        if (const int inner = e.count > 0 ? e.shared : l.up.data ? l.up.rows : only_mixes ? 0 : c.ffn; inner > 0) {
            if (c.activation != Activation::Relu) fits(l.gate, inner, c.hidden, "a gate matrix");
            fits(l.up, inner, c.hidden, "an up matrix");
            fits(l.down, c.hidden, inner, "a down matrix");
        }
        if (e.count != 0) fits(e, c);
        fits(l.attn_conv, l, c);
        fits(l.ffn_conv, l, c);
        if ((l.attn_conv.taps == 0) != (l.ffn_conv.taps == 0) || l.attn_conv.block != w.layers[0].attn_conv.block)
            throw std::invalid_argument("a layer's convolutions over a block do not fit together");
        fits(l.sinks, c.heads, false, "attention sinks");
        fits(l.attn_norm, c.hidden, !l.embed_norm.empty(), "an attention norm");
        if (l.join.data && l.embed_norm.empty()) throw std::invalid_argument("a layer that joins two inputs has no norm of the first");
        fits(l.ffn_norm, c.hidden, false, "a feed-forward norm");
        fits(l.post_attn_norm, c.hidden, false, "a post-attention norm");
        fits(l.post_ffn_norm, c.hidden, false, "a post-feed-forward norm");
        if (l.latent.rank == 0) {
            fits(l.q_norm, static_cast<int>(l.q_norm.size()) == q ? q : d, false, "a query norm");
            fits(l.k_norm, static_cast<int>(l.k_norm.size()) == kv ? kv : d, false, "a key norm");
        }
        fits(l.v_norm, d, false, "a value norm");
        fits(l.q_bias, q, false, "a query bias");
        fits(l.k_bias, kv, false, "a key bias");
        fits(l.v_bias, kv, false, "a value bias");
        fits(l.o_bias, c.hidden, false, "an attention output bias");
        fits(l.embed_norm, c.hidden, false, "an embedding norm");
        if (!l.embed_norm.empty() && &l != &w.layers[0])
            throw std::invalid_argument("only the first layer can read embeddings beside features");
        if (c.activation == Activation::Relu && (l.gate.data || e.gate.data))
            throw std::invalid_argument("a layer whose activation is relu2 has no gate");
        if (l.window < 0 || l.rope < -1 || l.rope >= static_cast<int>(w.ropes.size()))
            throw std::invalid_argument("a layer's window or rope table is out of range");
        const int turned = l.rope < 0 ? 0 : 2 * static_cast<int>(w.ropes[static_cast<size_t>(l.rope)].frequencies.size());
        if (l.attends() && (turned > d || (l.latent.rank > 0 && turned != l.latent.rotated)))
            throw std::invalid_argument("a rope table does not fit the head size");
        if (w.inputs.width > 0) {
            if (!l.feeds()) throw std::invalid_argument("a layer that has inputs of its own has no feed-forward");
            fits(l.input.gate, w.inputs.width, c.hidden, "the gate of a layer's inputs");
            fits(l.input.project, c.hidden, w.inputs.width, "the projection of a layer's inputs");
            fits(l.input.norm, c.hidden, true, "the norm of a layer's inputs");
        }
    }
    if (w.inputs.width > 0) {
        const int all = static_cast<int>(w.layers.size()) * w.inputs.width;
        fits(w.inputs.table, std::max(c.vocab, w.inputs.table.rows), all, "the table of layers' inputs");
        fits(w.inputs.project, all, c.hidden, "the projection to layers' inputs");
        fits(w.inputs.norm, w.inputs.width, true, "the norm of layers' inputs");
    }
    if (!attends) throw std::invalid_argument("no layer has attention");
    if (recurrent && convolved) throw std::invalid_argument("recurrent layers differ in their kinds");
    for (const auto& [frequencies, scale, growth, period] : w.ropes)
        if (frequencies.empty() || !(scale > 0) || !(growth >= 0) || (growth > 0 && period < 1))
            throw std::invalid_argument("a rope table has no frequencies or no scale, or grows by nothing");
}

// With the model's heads where a layer does not say its own.
std::vector<Layer> completed(std::vector<Layer> layers, const Config& c) {
    for (Layer& l : layers) {
        if (l.kv_heads == 0) l.kv_heads = c.kv_heads;
        if (l.head_dim == 0) l.head_dim = c.head_dim;
    }
    return layers;
}

}  // namespace

Weights::Weights(Config config_, std::vector<Layer> layers_, Matrix embedding_, Matrix head_, std::vector<float> final_norm_,
    std::vector<RopeTable> ropes_, LayerInputs inputs_)
    : config(config_),
      layers(completed(std::move(layers_), config_)),
      embedding(std::move(embedding_)),
      head(std::move(head_)),
      final_norm(std::move(final_norm_)),
      ropes(std::move(ropes_)),
      inputs(std::move(inputs_)) {
    check(*this);
}

size_t Weights::bytes() const {
    size_t bytes = embedding.bytes() + (head.data != embedding.data ? head.bytes() : 0) + inputs.table.bytes() + inputs.project.bytes();
    for (const Layer& l : layers)
        for (const Matrix* m : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down, &l.experts.router, &l.experts.gate, &l.experts.up,
                 &l.experts.down, &l.delta.qkv, &l.delta.z, &l.delta.b, &l.delta.a, &l.delta.o, &l.conv.in, &l.join, &l.latent.q_down,
                 &l.latent.k_up, &l.latent.v_up, &l.input.gate, &l.input.project, &l.attn_conv.project, &l.ffn_conv.project})
            bytes += m->bytes();
    return bytes;
}

}  // namespace outpace
