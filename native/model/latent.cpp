// Multi-head latent attention (arXiv 2405.04434), absorbed: a layer's cache has of each position one latent vector, which all
// heads share as key (with a rotated part of its own behind it) and as value. A head's query is brought into the space of
// latents before, and what it attended to out of it behind: both products are of one head each, so threads share heads.
#include <algorithm>
#include <cstring>

#include "model/run.h"
#include "runtime/denormals.h"

namespace outpace {

// The rotated part of a query or key, of which a file may have the pairs that turn together as neighbours.
void Model::Run::turned(const Layer& l, const Plan::Token& tok, const float* x, float scale, float* to) const {
    const int n = l.latent.rotated, half = n / 2;
    for (int i = 0; i < n; ++i) to[i] = l.latent.neighbours ? x[i < half ? 2 * i : 2 * (i - half) + 1] : x[i];
    const Rope& rope = m_.ropes_[static_cast<size_t>(l.rope)];
    k_.rotate(to, rope.cosines(tok.turn), rope.sines(tok.turn), half, scale);
}

// A head's queries of all tokens, to `rotated`.
void Model::Run::absorb(const Seat& me, const Layer& l, int head) {
    const Latent& a = l.latent;
    const int each = a.plain + a.rotated, padded = round_up(l.head_dim, 16), groups = a.k_up.groups, first = head * groups;
    const int stride = c_.heads * padded, blocks = a.rank / kRows;
    const Acts kind = a.k_up.acts();
    uint8_t* acts = s_.latents.get(kind);
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    std::fill(line + a.plain, line + a.k_up.in_padded(), 0.0f);
    for (int t = 0; t < n_; ++t) {
        std::memcpy(line, product_in(s_.q, t, l.q) + head * each, static_cast<size_t>(a.plain) * 4);
        k_.encode(kind, line, first, first + groups, acts, n_, t);
    }
    float* to = s_.rotated.get() + head * padded;
    k_.matmul(a.k_up, inputs_of(a.k_up, head), n_, head * blocks, (head + 1) * blocks, to - head * a.rank, stride);
    for (int t = 0; t < n_; ++t, to += stride) {
        for (int i = 0; i < a.rank; ++i) to[i] = times(to[i], c_.attention_scale);
        turned(l, token(t), product_in(s_.q, t, l.q) + head * each + a.plain, c_.attention_scale, to + a.rank);
        std::fill(to + each - a.plain + a.rank, to + padded, 0.0f);
    }
}

// A token's latent vector, to the cache.
void Model::Run::store_latent(const Seat& me, const Layer& l, int index, int t) {
    const Latent& a = l.latent;
    const KVShape& shape = m_.kv_.shape();
    const Plan::Token& tok = token(t);
    const int place = m_.places_[static_cast<size_t>(index)];
    uint8_t* block = const_cast<uint8_t*>(m_.plan_.blocks(tok, shape[place].pool)[tok.slot / kBlock]);
    const float* k = product_in(s_.k, t, l.k);
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    k_.rmsnorm(k, l.k_norm.data(), a.eps, a.rank, line);
    turned(l, tok, k + a.rank, 1.0f, line + a.rank);
    k_.put_key(line, l.head_dim, shape[place].dim_padded(), shape.type, block + shape.keys(place, 0), tok.slot % kBlock);
    k_.put_value(line, a.rank, shape[place].value_padded(), shape.type, block + shape.values(place, 0), tok.slot % kBlock);
}

bool Model::Run::latent(Seat& me, const Layer& l, int index) {
    const Latent& a = l.latent;
    if (a.q_down.data) {
        products(me, index, {{&a.q_down, s_.a.get()}, {&l.k, s_.k.get()}});
        if (!meet(me)) return false;
        const Part part = tokens(me);
        for (int t = part.begin; t < part.end; ++t) {
            k_.rmsnorm(product_in(s_.a, t, a.q_down), l.q_norm.data(), a.eps, l.q.cols, s_.line[static_cast<size_t>(me.id)].get());
            encode_line(me, l.q.cols, n_, t, {&l.q});
        }
        if (!solo_ && !meet(me)) return false;
        share(me, kClaimLatent, index, l.q.blocks, [&](int begin, int end) {
            k_.matmul(l.q, s_.in[static_cast<size_t>(mine(me))].get(l.q.acts()), n_, begin, end, s_.q.get(), l.q.out_padded());
        });
    } else {
        products(me, index, {{&l.q, s_.q.get()}, {&l.k, s_.k.get()}});
    }
    if (!meet(me)) return false;
    clock(me, kQkv);

    Part part = me.of(c_.heads + n_);
    for (int unit = part.begin; unit < part.end; ++unit) {
        if (unit < c_.heads)
            absorb(me, l, unit);
        else
            store_latent(me, l, index, unit - c_.heads);
    }
    if (!meet(me)) return false;
    clock(me, kRope);

    if (!attention(me, l, index)) return false;
    if (!meet(me)) return false;
    part = me.of(c_.heads);
    const int blocks = a.v_up.rows / c_.heads / kRows;
    for (int head = part.begin; head < part.end; ++head)
        k_.matmul(a.v_up, inputs_of(a.v_up, head), n_, head * blocks, (head + 1) * blocks, s_.q.get(), a.v_up.out_padded());
    if (!meet(me)) return false;
    part = me.of(n_);
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    std::fill(line + l.o.cols, line + l.o.in_padded(), 0.0f);
    for (int t = part.begin; t < part.end; ++t) {
        std::memcpy(line, product_in(s_.q, t, a.v_up), static_cast<size_t>(l.o.cols) * 4);
        k_.encode(l.o.acts(), line, 0, l.o.groups, s_.heads.get(l.o.acts()), n_, t);
    }
    return true;
}

}  // namespace outpace
