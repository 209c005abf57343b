// Recurrent layers: the gated delta rule and a state space's step on a tile of a head's state, and the short convolution before.
//
// One form for reading a prompt, decoding and verification: a token's operations are the same and in the same order whatever
// stands beside it.
#pragma once

#include "kernels/math.h"
#include "kernels/table.h"

namespace outpace {
namespace OUTPACE_NS {

static_assert(kStateColumns == 32, "a tile is two vectors wide");

// to = decay * from + key update', tiles [rows][kStateColumns].
static void delta_replay(const float* from, const float* key, const float* update, float decay, int rows, float* to) {
    const F e = set1(decay), u0 = load(update), u1 = load(update + 16);
    for (int i = 0; i < rows; ++i, from += kStateColumns, to += kStateColumns) {
        const F k = set1(key[i]);
        store(to, fma(k, u0, mul(e, load(from))));
        store(to + 16, fma(k, u1, mul(e, load(from + 16))));
    }
}

// A token's update u into a tile, and its output; the state behind it to `to`, unless that is null. Sums of even and of odd
// rows run beside each other and are added at the end.
template <bool stores>
INLINE void take_in(const DeltaToken& token, const float* s, int rows, float* to, F u0, F u1, F& out0, F& out1) {
    const F e = set1(token.decay);
    F even0 = zero(), even1 = zero(), odd0 = zero(), odd1 = zero();
    for (int i = 0; i < rows; i += 2, s += 2 * kStateColumns) {
        const F k = set1(token.key[i]), l = set1(token.key[i + 1]), p = set1(token.query[i]), q = set1(token.query[i + 1]);
        const F a = fma(k, u0, mul(e, load(s))), b = fma(k, u1, mul(e, load(s + 16)));
        const F c = fma(l, u0, mul(e, load(s + 32))), d = fma(l, u1, mul(e, load(s + 48)));
        if (stores) {
            store(to, a), store(to + 16, b), store(to + 32, c), store(to + 48, d);
            to += 2 * kStateColumns;
        }
        even0 = fma(p, a, even0);
        even1 = fma(p, b, even1);
        odd0 = fma(q, c, odd0);
        odd1 = fma(q, d, odd1);
    }
    store(token.update, u0), store(token.update + 16, u1);
    out0 = add(even0, odd0), out1 = add(even1, odd1);
}

template <bool stores>
INLINE void delta_token(const DeltaToken& token, const float* from, int rows, float* to) {
    const F e = set1(token.decay);
    F even0 = zero(), even1 = zero(), odd0 = zero(), odd1 = zero();
    const float* s = from;
    for (int i = 0; i < rows; i += 2, s += 2 * kStateColumns) {
        const F k = set1(token.key[i]), l = set1(token.key[i + 1]);
        even0 = fma(k, load(s), even0);
        even1 = fma(k, load(s + 16), even1);
        odd0 = fma(l, load(s + 32), odd0);
        odd1 = fma(l, load(s + 48), odd1);
    }
    const F beta = set1(token.beta);
    const F u0 = mul(beta, sub(load(token.value), mul(e, add(even0, odd0))));
    const F u1 = mul(beta, sub(load(token.value + 16), mul(e, add(even1, odd1))));
    take_in<stores>(token, from, rows, to, u0, u1, even0, even1);
    store(token.out, even0), store(token.out + 16, even1);
}

static void delta_step(const DeltaToken& token, const float* from, int rows, float* to) {
    if (to)
        delta_token<true>(token, from, rows, to);
    else
        delta_token<false>(token, from, rows, nullptr);
}

static void scan_step(const DeltaToken& token, const float* from, int rows, float* to) {
    const F beta = set1(token.beta), skip = set1(token.skip), v0 = load(token.value), v1 = load(token.value + 16);
    F out0, out1;
    if (to)
        take_in<true>(token, from, rows, to, mul(beta, v0), mul(beta, v1), out0, out1);
    else
        take_in<false>(token, from, rows, nullptr, mul(beta, v0), mul(beta, v1), out0, out1);
    store(token.out, fma(skip, v0, out0)), store(token.out + 16, fma(skip, v1, out1));
}

// out[i] = sum of w[j * stride + i] * x[j][i] over the taps, the oldest first, on top of bias[i], where there is one; or silu of
// it; n a multiple of 16.
static void convolve(const float* const* x, const float* w, const float* bias, int stride, int taps, int n, bool activated, float* out) {
    for (int i = 0; i < n; i += 16) {
        F total = bias ? fma(load(w + i), load(x[0] + i), load(bias + i)) : mul(load(w + i), load(x[0] + i));
        for (int j = 1; j < taps; ++j) total = fma(load(w + static_cast<int64_t>(j) * stride + i), load(x[j] + i), total);
        store(out + i, activated ? silu(total) : total);
    }
}

}  // namespace OUTPACE_NS
}  // namespace outpace
