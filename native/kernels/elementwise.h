// Everything between two matrix products but attention. One token at a time: nothing here sees the width.
#pragma once

#include <cmath>

#include "kernels/math.h"
#include "kernels/table.h"
#include "runtime/denormals.h"
#include "weights/halves.h"

namespace outpace {
namespace OUTPACE_NS {

static void rmsnorm(const float* x, const float* w, float eps, int n, float* out) {
    F squares = zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const F v = load(x + i);
        squares = fma(v, v, squares);
    }
    if (i < n) {
        const F v = load_some(x + i, n - i, 0.0f);
        squares = fma(v, v, squares);
    }
    const float scale = 1.0f / std::sqrt(over(sum(squares), static_cast<float>(n)) + eps);
    for (int j = 0; j < n; ++j) out[j] = times(times(x[j], scale), w[j]);
}

static void add_to(float* x, const float* y, int n) {
    for (int i = 0; i < n; ++i) x[i] += y[i];
}

static void rotate(float* x, const float* cosines, const float* sines, int half, float scale) {
    for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = times(times(a, cosines[i]) - times(b, sines[i]), scale);
        x[i + half] = times(times(b, cosines[i]) + times(a, sines[i]), scale);
    }
}

static void gate(Activation activation, const float* g, const float* up, int n, float* out) {
    if (activation == Activation::Silu)
        for (int i = 0; i < n; i += 16) store(out + i, mul(silu(load(g + i)), load(up + i)));
    else if (activation == Activation::GeluTanh)
        for (int i = 0; i < n; i += 16) store(out + i, mul(gelu_tanh(load(g + i)), load(up + i)));
    else if (activation == Activation::Sigmoid)
        for (int i = 0; i < n; i += 16) {
            const F a = load(g + i);
            store(out + i, div(load(up + i), add(set1(1.0f), exp(sub(zero(), a)))));
        }
    else if (activation == Activation::Relu)  // a NaN stays one
        for (int i = 0; i < n; i += 16) {
            const F a = load(g + i);
            store(out + i, mul(select(is_nan(a), a, max(a, zero())), load(up + i)));
        }
    else  // gpt-oss's: (up + 1) g sigmoid(1.702 g), g at most 7 and up from -7 to 7
        for (int i = 0; i < n; i += 16) {
            const F a = load(g + i), b = load(up + i);
            const F x = select(is_nan(a), a, min(a, set1(7.0f)));
            const F y = select(is_nan(b), b, min(max(b, set1(-7.0f)), set1(7.0f)));
            store(out + i, mul(add(y, set1(1.0f)), div(x, add(set1(1.0f), exp(mul(x, set1(-1.702f)))))));
        }
}

static void cap(float* x, int n, float limit) {
    for (int i = 0; i < n; i += 16) store(x + i, soft_cap(load(x + i), set1(limit)));
}

// 16 values as int8: q = round(x * 127 / max|x|), with their scale and their sum.
INLINE int32_t encode_half(const float* x, uint8_t* q, float* scale) {
    const F a = load(x);
    const float most = peak(abs(a));
    *scale = any(is_nan(a)) ? NAN : over(most, 127.0f);  // NaN and infinity must not turn into numbers here
    // Values too small to divide by, and what is not finite, become 0; with the scale above the latter comes out as NaN.
    const F finite = select(less(abs(a), set1(INFINITY)), a, zero());
    const I rounded = to_int(mul(finite, set1(most > 1e-30f ? 127.0f / most : 0.0f)));
    store_i8(q, rounded);
    return sum_i(rounded);
}

// A group; the record is described in matrix.h. A scale for each 16 values, not 32, halves the error in the logits.
INLINE void encode_i8(const float* x, uint8_t* record) {
    float low, high;
    const int32_t sum_low = encode_half(x, record, &low), sum_high = encode_half(x + 16, record + 16, &high);
    const float total = times(low, static_cast<float>(sum_low)) + times(high, static_cast<float>(sum_high));
    const int32_t shift_low = -128 * sum_low, shift_high = -128 * sum_high;
    std::memcpy(record + 32, &low, 4);
    std::memcpy(record + 36, &high, 4);
    std::memcpy(record + 40, &total, 4);
    std::memcpy(record + 44, &shift_low, 4);
    std::memcpy(record + 48, &shift_high, 4);
}

static void encode(Acts acts, const float* x, int begin, int end, uint8_t* dst, int n, int t) {
    const int size = act_bytes(acts);
    for (int g = begin; g < end; ++g, x += kGroup) {
        uint8_t* record = dst + (static_cast<int64_t>(g) * n + t) * size;
        if (acts == Acts::I8) {
            encode_i8(x, record);
        } else if (acts == Acts::B16) {
            uint16_t halves[kGroup];
            for (int i = 0; i < kGroup; ++i) halves[i] = float_to_bf16(x[i]);
            std::memcpy(record, halves, sizeof halves);
        } else {
            std::memcpy(record, x, kGroup * 4);
        }
    }
}

static Best argmax(const float* x, int n) {
    // Blocks of 1024: the peak of a block, then its place only when it beats what came before.
    Best best{-INFINITY, 0, false};
    bool found = false;
    for (int start = 0; start < n; start += 1024) {
        const int end = start + 1024 < n ? start + 1024 : n;
        F top = set1(-INFINITY);
        F nans = zero();
        int i = start;
        for (; i + 16 <= end; i += 16) {
            const F v = load(x + i);
            top = max(top, v);
            nans = select(is_nan(v), set1(1.0f), nans);
        }
        float value = peak(top);
        bool nan = peak(nans) > 0.0f;
        for (; i < end; ++i) {
            value = x[i] > value ? x[i] : value;
            nan = nan || x[i] != x[i];
        }
        if (nan) {
            best.nan = true;
            return best;
        }
        if (value > best.value || (!found && value == best.value)) {
            int at = start;
            while (x[at] != value) ++at;
            best.value = value;
            best.index = at;
            found = true;
        }
    }
    return best;
}

}  // namespace OUTPACE_NS
}  // namespace outpace
