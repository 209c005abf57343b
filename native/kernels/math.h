// Transcendentals from basic operations: a lane's result depends on that lane's input alone, never on its place.
#pragma once

#include "kernels/simd.h"

namespace outpace {
namespace OUTPACE_NS {

// The first `count` lanes from memory (all 16 at most, none if negative), `rest` beyond.
INLINE F load_some(const float* p, int count, float rest) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = i < count ? p[i] : rest;
    return load(lanes);
}

// e^(y - n log 2), n the nearest whole number.
INLINE F exp_rest(F y, I n) {
    const F k = to_float(n);
    F r = fma(k, set1(-0.693359375f), y);
    r = fma(k, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    return add(fma(p, mul(r, r), r), set1(1.0f));
}

// e^x. Cody and Waite's reduction x = n log 2 + r, |r| <= log(2) / 2, then a polynomial in r (Taylor's first terms with
// minimax-adjusted tail, as in Cephes' expf); relative error under 2e-7. Below -87.3 the result is 0 exactly, so a
// masked score of -inf weighs nothing; above 88.3 it saturates. NaN stays NaN.
INLINE F exp(F x) {
    const M gone = less(x, set1(-87.3f));
    const M nan = is_nan(x);
    const F y = min(max(x, set1(-87.3f)), set1(88.3f));
    const I n = to_int(mul(y, set1(1.44269504088896341f)));
    return select(nan, x, select(gone, zero(), times_pow2(exp_rest(y, n), n)));
}

// The same for x that is not above 0, in fewer steps.
INLINE F exp_down(F x) {
    const I n = to_int(mul(x, set1(1.44269504088896341f)));
    return select(less(x, set1(-87.3f)), zero(), times_pow2(exp_rest(x, n), n));
}

// x / (1 + e^-x)
INLINE F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3)
INLINE F gelu_tanh(F x) {
    const F u = mul(set1(0.7978845608028654f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
    return div(x, add(set1(1.0f), exp(mul(set1(-2.0f), u))));
}

// tanh x: near 0 a polynomial (Cephes' tanhf), which keeps what 1 - 2 / (1 + e^2x) would lose there. NaN stays NaN.
INLINE F tanh(F x) {
    const F size = abs(x), z = mul(x, x);
    F p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    const F far = sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), exp(add(size, size)))));
    const F signed_far = select(less(x, zero()), sub(zero(), far), far);
    return select(less(size, set1(0.625f)), fma(mul(p, z), x, x), signed_far);
}

// x kept within +-limit, softly.
INLINE F soft_cap(F x, F limit) { return mul(tanh(div(x, limit)), limit); }

}  // namespace OUTPACE_NS
}  // namespace outpace
