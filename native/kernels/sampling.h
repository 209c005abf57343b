// The parts of a choice that look at the whole vocabulary. Only these are vectorised: they narrow it down to candidates,
// and choose.cpp then does exactly what sampling.py does.
#pragma once

#include "kernels/functions.h"
#include "kernels/math.h"
#include "kernels/table.h"

namespace outpace {
namespace OUTPACE_NS {

// Ids in [first, n) with x >= threshold, ascending; returns how many.
static int at_least(const float* x, int first, int n, float threshold, int32_t* ids) {
    int count = 0, i = first;
    const F limit = set1(threshold);
    for (; i + 16 <= n; i += 16) {
        const F hit = select(less(load(x + i), limit), zero(), set1(1.0f));
        if (!(peak(hit) > 0.0f)) continue;
        for (int k = i; k < i + 16; ++k)
            if (x[k] >= threshold) ids[count++] = k;
    }
    for (; i < n; ++i)
        if (x[i] >= threshold) ids[count++] = i;
    return count;
}

// weights[i] = e^(x[i] / temperature - top) in float64; 0 below e^-700.
static void weigh(const float* x, int n, double temperature, double top, double* weights) {
    for (int i = 0; i < n; ++i) weights[i] = exponential(static_cast<double>(x[i]) / temperature - top);
}

// Ten rounds of Philox4x32 for 16 counters (blocks[lane], c1, c2, c3): words[4 * lane + word].
INLINE void philox16(const uint32_t* blocks, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key, uint32_t* words) {
    uint32_t x[4][16];
    const auto all = [](uint32_t value) { return set1_i(static_cast<int32_t>(value)); };
    I x0 = load_i(blocks), x1 = all(c1), x2 = all(c2), x3 = all(c3);
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const Product a = mul_wide(x0, 0xD2511F53u), b = mul_wide(x2, 0xCD9E8D57u);
        x0 = xor_i(xor_i(b.high, x1), all(k0));
        x2 = xor_i(xor_i(a.high, x3), all(k1));
        x1 = b.low;
        x3 = a.low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    store_i(x[0], x0);
    store_i(x[1], x1);
    store_i(x[2], x2);
    store_i(x[3], x3);
    for (int i = 0; i < 16; ++i)
        for (int word = 0; word < 4; ++word) words[4 * i + word] = x[word][i];
}

// A token may reach `best` once Gumbel noise g is added to x / temperature: g = -log(-log u) < -log(1 - u), so it is out when
// 1 - u > e^(x / temperature - best); float32 with a margin.
INLINE float with_margin(float best) { return best - 0.01f - 1e-6f * (best < 0.0f ? -best : best); }
INLINE float beyond_of(uint32_t word) { return static_cast<float>(static_cast<int32_t>(~word >> 1)) * 0x1p-31f; }  // about 1 - u

// Ids in [first, n) that may score at least `best`; first a multiple of 64.
static int gumbel_survivors(const float* x, int first, int n, float inverse_temperature, float best, uint64_t key, uint32_t index,
    uint32_t sample, uint32_t stream, int32_t* ids) {
    const F shift = set1(with_margin(best)), scale = set1(inverse_temperature);
    const F never = set1(2.3e-10f);  // below every 1 - u
    int count = 0;
    for (int start = first; start < n; start += 64) {
        const int end = start + 64 < n ? start + 64 : n;
        float chance[64];
        bool possible = false;
        for (int i = 0; i < 64; i += 16) {
            const F v = start + i + 16 <= n ? load(x + start + i) : load_some(x + start + i, n - start - i, -INFINITY);
            const F e = exp(sub(mul(v, scale), shift));
            store(chance + i, e);
            possible = possible || peak(sub(e, never)) >= 0.0f;
        }
        if (!possible) continue;
        uint32_t words[64], blocks[16];
        for (uint32_t i = 0; i < 16; ++i) blocks[i] = static_cast<uint32_t>(start) / 4 + i;
        philox16(blocks, index, sample, stream, key, words);
        uint32_t hits[64], any = 0;
        for (int i = 0; i < 64; ++i) {
            hits[i] = beyond_of(words[i]) <= chance[i];
            any |= hits[i];
        }
        for (int i = start; any && i < end; ++i)
            if (hits[i - start]) ids[count++] = i;
    }
    return count;
}

// The same where x [n] are the logits of `tokens` [n], which are not the whole vocabulary: their places.
static int gumbel_survivors_of(const float* x, const int32_t* tokens, int n, float inverse_temperature, float best, uint64_t key,
    uint32_t index, uint32_t sample, uint32_t stream, int32_t* places) {
    const F shift = set1(with_margin(best)), scale = set1(inverse_temperature), never = set1(2.3e-10f);
    int count = 0;
    for (int start = 0; start < n; start += 16) {
        const int some = n - start < 16 ? n - start : 16;
        const F v = some == 16 ? load(x + start) : load_some(x + start, some, -INFINITY);
        const F e = exp(sub(mul(v, scale), shift));
        if (!(peak(sub(e, never)) >= 0.0f)) continue;
        float chance[16];
        store(chance, e);
        uint32_t words[64], blocks[16] = {};
        for (int i = 0; i < some; ++i) blocks[i] = static_cast<uint32_t>(tokens[start + i]) / 4;
        philox16(blocks, index, sample, stream, key, words);
        for (int i = 0; i < some; ++i)
            if (beyond_of(words[4 * i + tokens[start + i] % 4]) <= chance[i]) places[count++] = start + i;
    }
    return count;
}

}  // namespace OUTPACE_NS
}  // namespace outpace
