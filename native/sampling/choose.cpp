#include "sampling/choose.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

namespace outpace {
namespace {

constexpr double kGumbelMax = 22.88;  // as in noise.py
constexpr double kEdge = 1e-9;        // nearer to top_p than this, the reference's own rounding decides

// noise.py's log: the same basic operations in the same order. (This file is compiled without contraction.)
double natural_log(double x) {
    int exponent;
    double m = std::frexp(x, &exponent);
    if (m < 0x1.6a09e667f3bcdp-1) {
        m = m + m;
        --exponent;
    }
    const double k = static_cast<double>(exponent), f = m - 1.0, s = f / (2.0 + f), z = s * s;
    double tail = 2.0 / 21.0;
    for (int i = 8; i >= 0; --i) tail = tail * z + 2.0 / (2 * i + 3);
    return k * 6.93147180369123816490e-01 + (f - (s * (f - z * tail) - k * 1.90821492927058770002e-10));
}

uint32_t philox_word(const Sampling& s, uint32_t token) {
    uint32_t x0 = token / 4, x1 = s.index, x2 = s.sample, x3 = s.stream;
    uint32_t k0 = static_cast<uint32_t>(s.seed), k1 = static_cast<uint32_t>(s.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(x0) * 0xD2511F53u, b = static_cast<uint64_t>(x2) * 0xCD9E8D57u;
        x0 = static_cast<uint32_t>(b >> 32) ^ x1 ^ k0;
        x2 = static_cast<uint32_t>(a >> 32) ^ x3 ^ k1;
        x1 = static_cast<uint32_t>(b);
        x3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const uint32_t words[4] = {x0, x1, x2, x3};
    return words[token % 4];
}

double gumbel(const Sampling& s, int token) {
    const double u = (static_cast<double>(philox_word(s, static_cast<uint32_t>(token))) + 0.5) * 0x1p-32;
    return -natural_log(-natural_log(u));
}

void apply(const Edit& edit, std::vector<float>& logits) {
    const auto at = [&](int32_t id) -> float& {
        if (id < 0 || id >= static_cast<int32_t>(logits.size()))
            throw std::out_of_range("a rule names token " + std::to_string(id) + ", which is not in the vocabulary");
        return logits[static_cast<size_t>(id)];
    };
    switch (edit.kind) {
        case Edit::Bias:
            for (size_t i = 0; i < edit.ids.size(); ++i) at(edit.ids[i]) += edit.values[i];
            return;
        case Edit::Allowed: {
            std::vector<float> kept;
            for (const int32_t id : edit.ids) kept.push_back(at(id));
            std::fill(logits.begin(), logits.end(), -std::numeric_limits<float>::infinity());
            for (size_t i = 0; i < kept.size(); ++i) at(edit.ids[i]) = kept[i];
            return;
        }
        case Edit::Penalties:
            if (edit.repetition != 1.0f) {
                const auto punish = [&](int32_t id) {
                    float& v = at(id);
                    v = v > 0.0f ? v / edit.repetition : v * edit.repetition;
                };
                for (const int32_t id : edit.ids) punish(id);
                for (const int32_t id : edit.output)
                    if (!std::binary_search(edit.ids.begin(), edit.ids.end(), id)) punish(id);
            }
            if (edit.presence != 0.0f || edit.frequency != 0.0f)
                for (size_t i = 0; i < edit.output.size(); ++i)
                    at(edit.output[i]) -= edit.presence + edit.frequency * edit.values[i];
    }
}

// The k-th largest logit, or -inf when no more than k are finite.
float kth_largest(const float* logits, int vocab, int k, const Kernels& kernels, std::vector<int32_t>& ids) {
    constexpr int stretch = 4096;
    const float lowest = std::numeric_limits<float>::lowest();
    std::vector<float> best;
    float threshold = lowest;
    const auto cut = [&] {
        std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<float>());
        best.resize(static_cast<size_t>(k));
        threshold = best.back();
    };
    for (int start = 0; start < vocab; start += stretch) {
        const int end = std::min(start + stretch, vocab);
        const int count = kernels.at_least(logits, start, end, threshold, ids.data());
        for (int i = 0; i < count; ++i) best.push_back(logits[ids[static_cast<size_t>(i)]]);
        if (best.size() > static_cast<size_t>(k) * 2 || (best.size() > static_cast<size_t>(k) && end == vocab)) cut();
    }
    if (best.size() < static_cast<size_t>(k)) return -std::numeric_limits<float>::infinity();
    return threshold;
}

struct Choice {
    const float* logits;
    int vocab;
    const Sampling& s;
    const Kernels& kernels;
    int best;  // the likeliest token
    std::vector<int32_t> ids;
    bool narrowed = false;       // whether `kept` holds what survived so far, ascending; else all finite logits do
    std::vector<int32_t> kept;

    double scaled(int token) const { return static_cast<double>(logits[token]) / s.temperature; }

    void top_k() {
        const float kth = kth_largest(logits, vocab, s.top_k, kernels, ids);
        if (kth == -std::numeric_limits<float>::infinity()) return;
        const int count = kernels.at_least(logits, 0, vocab, kth, ids.data());
        int above = 0;
        for (int i = 0; i < count; ++i) above += logits[ids[static_cast<size_t>(i)]] > kth;
        int ties = s.top_k - above;  // the lowest ids among equals
        for (int i = 0; i < count; ++i) {
            const int32_t id = ids[static_cast<size_t>(i)];
            if (logits[id] > kth || ties-- > 0) kept.push_back(id);
        }
        narrowed = true;
    }

    // False when the cut is too close to call.
    bool top_p() {
        const double top = scaled(best);
        std::vector<double> weights;
        std::vector<float> values;
        if (narrowed) {
            for (const int32_t id : kept) values.push_back(logits[id]);
            weights.resize(values.size());
            kernels.weigh(values.data(), static_cast<int>(values.size()), s.temperature, top, weights.data());
        } else {
            weights.resize(static_cast<size_t>(vocab));
            kernels.weigh(logits, vocab, s.temperature, top, weights.data());
        }
        double total = 0.0;
        for (const double w : weights) total += w;
        const auto token = [&](int32_t i) { return narrowed ? kept[static_cast<size_t>(i)] : i; };
        for (double least = 1e-4;; least = least > 1e-200 ? least * least : 0.0) {
            std::vector<int32_t> order;  // indices into weights
            for (size_t i = 0; i < weights.size(); ++i)
                if (weights[i] >= least && logits[token(static_cast<int32_t>(i))] > -std::numeric_limits<float>::infinity())
                    order.push_back(static_cast<int32_t>(i));
            std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
                const float x = logits[token(a)], y = logits[token(b)];
                return x > y || (x == y && a < b);
            });
            double reached = 0.0;
            for (size_t i = 0; i < order.size(); ++i) {
                reached += weights[static_cast<size_t>(order[i])] / total;
                if (std::fabs(reached - s.top_p) < kEdge) return false;
                if (reached < s.top_p) continue;
                std::vector<int32_t> survivors;
                for (size_t j = 0; j <= i; ++j) survivors.push_back(token(order[j]));
                std::sort(survivors.begin(), survivors.end());
                kept = std::move(survivors);
                narrowed = true;
                return true;
            }
            if (least == 0.0) return false;
        }
    }

    void min_p() {
        const double limit = scaled(best) + s.log_min_p;
        if (!narrowed) {
            // A float32 threshold a little lower first, then the exact test.
            const double loose = limit * s.temperature - 1e-5 * (1.0 + std::fabs(limit * s.temperature));
            const int count = kernels.at_least(logits, 0, vocab, static_cast<float>(loose), ids.data());
            kept.assign(ids.begin(), ids.begin() + count);
            narrowed = true;
        }
        kept.erase(std::remove_if(kept.begin(), kept.end(), [&](int32_t id) { return !(scaled(id) >= limit); }), kept.end());
    }

    int draw() {
        int chosen = best;
        double score = scaled(best) + gumbel(s, best);
        const auto consider = [&](int token) {
            const double without = scaled(token);
            if (token == best || !(without + kGumbelMax >= score)) return;
            const double with = without + gumbel(s, token);
            if (with > score || (with == score && token < chosen)) {
                score = with;
                chosen = token;
            }
        };
        if (narrowed) {
            for (const int32_t id : kept) consider(id);
            return chosen;
        }
        constexpr int stretch = 2048;
        for (int start = 0; start < vocab; start += stretch) {
            const int count = kernels.gumbel_survivors(logits, start, std::min(start + stretch, vocab),
                                                       static_cast<float>(1.0 / s.temperature), static_cast<float>(score),
                                                       s.seed, s.index, s.sample, s.stream, ids.data());
            for (int i = 0; i < count; ++i) consider(ids[static_cast<size_t>(i)]);
        }
        return chosen;
    }
};

}  // namespace

int choose(const float* logits, int vocab, const std::vector<Edit>& edits, const Sampling& sampling, const Kernels& kernels) {
    std::vector<float> edited;
    if (!edits.empty()) {
        edited.assign(logits, logits + vocab);
        for (const Edit& edit : edits) apply(edit, edited);
        logits = edited.data();
    }
    const Best best = kernels.argmax(logits, vocab);
    if (best.nan) return kNaN;
    if (best.value == -std::numeric_limits<float>::infinity()) return kNoneAllowed;
    if (sampling.temperature == 0.0) return best.index;
    if (best.value == std::numeric_limits<float>::infinity()) return kUndecided;
    Choice choice{logits, vocab, sampling, kernels, best.index, std::vector<int32_t>(static_cast<size_t>(vocab)), false, {}};
    if (sampling.top_k > 0) choice.top_k();
    if (sampling.top_p < 1.0 && !choice.top_p()) return kUndecided;
    if (sampling.log_min_p > -std::numeric_limits<double>::infinity()) choice.min_p();
    return choice.draw();
}

}  // namespace outpace
