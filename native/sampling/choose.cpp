#include "sampling/choose.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels/functions.h"

namespace outpace {
namespace {

constexpr double kGumbelMax = 22.88;  // as in noise.py
constexpr double kEdge = 1e-9;        // nearer to a filter's edge than this, the reference's own rounding decides
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

void check(int32_t id, int vocab) {
    if (id < 0 || id >= vocab) throw std::out_of_range("a rule names token " + std::to_string(id) + ", which is not in the vocabulary");
}

void apply(const Edit& edit, std::vector<float>& logits) {
    const auto at = [&](int32_t id) -> float& {
        check(id, static_cast<int>(logits.size()));
        return logits[static_cast<size_t>(id)];
    };
    switch (edit.kind) {
        case Edit::Bias:
            for (size_t i = 0; i < edit.ids.size(); ++i) at(edit.ids[i]) += edit.values[i];
            return;
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
                for (size_t i = 0; i < edit.output.size(); ++i) at(edit.output[i]) -= edit.presence + edit.frequency * edit.values[i];
            return;
        case Edit::Allowed:
        case Edit::Mask: return;  // these only forbid: see restrict
    }
}

// Which tokens every rule allows, as bits; false: no rule forbids any.
bool restrict(const std::vector<Edit>& edits, int vocab, std::vector<uint32_t>& mask) {
    const size_t words = (static_cast<size_t>(vocab) + 31) / 32;
    bool restricted = false;
    std::vector<uint32_t> own;
    for (const Edit& edit : edits) {
        if (!edit.restricts()) continue;
        const std::vector<uint32_t>* bits = &edit.bits;
        if (edit.kind == Edit::Allowed) {
            own.assign(words, 0);
            for (const int32_t id : edit.ids) {
                check(id, vocab);
                own[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
            }
            bits = &own;
        }
        if (bits->size() != words)
            throw std::invalid_argument("a rule's mask has " + std::to_string(bits->size()) + " words, a vocabulary of " +
                                        std::to_string(vocab) + " tokens needs " + std::to_string(words));
        if (!restricted) mask.assign(words, ~0u);
        for (size_t i = 0; i < words; ++i) mask[i] &= (*bits)[i];
        restricted = true;
    }
    if (restricted && vocab % 32 != 0) mask.back() &= (1u << (vocab % 32)) - 1;
    return restricted;
}

bool allows(const uint32_t* mask, int token) { return mask[token / 32] >> (token % 32) & 1u; }

int count(const std::vector<uint32_t>& mask) {
    int allowed = 0;
    for (const uint32_t word : mask) allowed += __builtin_popcount(word);
    return allowed;
}

// The tokens that a mask allows, ascending.
template <class Visit>
void each(const std::vector<uint32_t>& mask, const Visit& visit) {
    for (size_t word = 0; word < mask.size(); ++word)
        for (uint32_t left = mask[word]; left; left &= left - 1) visit(static_cast<int>(word) * 32 + __builtin_ctz(left));
}

struct Choice {
    const float* logits;
    int vocab;
    const Sampling& s;
    const Kernels& kernels;
    int best;               // the likeliest token
    int32_t* ids;           // [vocab]
    const uint32_t* mask;   // null: all are allowed
    bool narrowed = false;  // whether `kept` holds what survived so far, ascending; else all allowed finite logits do
    std::vector<int32_t> kept;

    double scaled(int token) const { return static_cast<double>(logits[token]) / s.temperature; }
    bool allowed(int token) const { return !mask || allows(mask, token); }

    // Allowed ids in [first, n) with a logit of at least `threshold`, ascending, to `ids`; returns how many.
    int at_least(int first, int n, float threshold) const {
        const int count = kernels.at_least(logits, first, n, threshold, ids);
        if (!mask) return count;
        return static_cast<int>(std::remove_if(ids, ids + count, [&](int32_t id) { return !allowed(id); }) - ids);
    }

    // The k-th largest logit, or -inf when no more than k are finite.
    float kth_largest(int k) const {
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
            const int count = at_least(start, end, threshold);
            for (int i = 0; i < count; ++i) best.push_back(logits[ids[i]]);
            if (best.size() > static_cast<size_t>(k) * 2 || (best.size() > static_cast<size_t>(k) && end == vocab)) cut();
        }
        if (best.size() < static_cast<size_t>(k)) return -kInfinity;
        return threshold;
    }

    void top_k() {
        const auto k = static_cast<size_t>(s.top_k);
        float kth;
        std::vector<int32_t> from;
        if (narrowed) {
            if (kept.size() <= k) return;
            std::vector<float> values;
            for (const int32_t id : kept) values.push_back(logits[id]);
            std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(k) - 1, values.end(), std::greater<float>());
            kth = values[k - 1];
            from.swap(kept);
        } else {
            kth = kth_largest(s.top_k);
            if (kth == -kInfinity) return;
            from.assign(ids, ids + at_least(0, vocab, kth));
        }
        auto ties = static_cast<std::ptrdiff_t>(k);  // the lowest ids among equals
        for (const int32_t id : from) ties -= logits[id] > kth;
        for (const int32_t id : from)
            if (logits[id] > kth || (logits[id] == kth && ties-- > 0)) kept.push_back(id);
        narrowed = true;
    }

    // Sum of e^(logit / temperature - top) over all that are still there.
    double weight(double top) const {
        const int n = narrowed ? static_cast<int>(kept.size()) : vocab;
        double total = 0.0;
        for (int first = 0; first < n; first += kStretch) {
            const int some = std::min(kStretch, n - first);
            float left[kStretch];
            for (int i = 0; (narrowed || mask) && i < some; ++i) {
                const int id = narrowed ? kept[static_cast<size_t>(first + i)] : first + i;
                left[i] = allowed(id) ? logits[id] : -kInfinity;
            }
            total += weight_of(narrowed || mask ? left : logits + first, some, s.temperature, top, kernels);
        }
        return total;
    }

    // False when the cut is too close to call.
    bool top_p() {
        const double top = scaled(best), total = weight(top);
        for (double drop = 4.0;; drop *= 2.0) {  // the likeliest, further down where they are not enough
            const float lowest = std::numeric_limits<float>::lowest();
            const float least = drop < 600.0 ? std::max(lowest, static_cast<float>((top - drop) * s.temperature)) : lowest;
            int32_t* end = ids;
            if (narrowed)
                end = std::copy_if(kept.begin(), kept.end(), ids, [&](int32_t id) { return logits[id] >= least; });
            else
                end += at_least(0, vocab, least);
            std::sort(ids, end, [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
            double reached = 0.0;
            for (const int32_t* id = ids; id < end; ++id) {
                reached += exponential(scaled(*id) - top) / total;
                if (std::fabs(reached - s.top_p) < kEdge) return false;
                if (reached < s.top_p) continue;
                kept.assign(static_cast<const int32_t*>(ids), id + 1);
                std::sort(kept.begin(), kept.end());
                narrowed = true;
                return true;
            }
            if (least == lowest) return false;
        }
    }

    // Keeps logits of at least the largest less n standard deviations of all that are allowed and above -inf. False when
    // one is too close to call: the sums here are added in another order than the reference's.
    bool top_n_sigma() {
        int64_t count = 0;
        const auto sum = [&](const auto& of) {
            double lanes[8] = {}, total = 0.0;
            for (int i = 0; i < vocab; ++i)
                if (logits[i] > -kInfinity && allowed(i)) lanes[i % 8] += of(logits[i]);
            for (const double lane : lanes) total += lane;
            return total;
        };
        const double total = sum([&](float x) { return ++count, static_cast<double>(x); }), mean = total / static_cast<double>(count);
        const double squares = sum([&](float x) { return (x - mean) * (x - mean); });
        const double largest = logits[best];
        const double limit = largest - s.top_n_sigma * std::sqrt(squares / static_cast<double>(count));
        const double edge = kEdge * (1.0 + std::fabs(largest) + std::fabs(limit));
        const int near = at_least(0, vocab, std::nextafter(static_cast<float>(limit - edge), -kInfinity));
        kept.clear();
        for (int i = 0; i < near; ++i) {
            const double distance = logits[ids[i]] - limit;
            if (std::fabs(distance) <= edge) return false;
            if (distance > 0.0) kept.push_back(ids[i]);
        }
        narrowed = true;
        return true;
    }

    void min_p() {
        const double limit = scaled(best) + natural_log(s.min_p);
        if (!narrowed) {
            // A float32 threshold a little lower first, then the exact test.
            const double loose = limit * s.temperature - 1e-5 * (1.0 + std::fabs(limit * s.temperature));
            const int count = at_least(0, vocab, static_cast<float>(loose));
            kept.assign(ids, ids + count);
            narrowed = true;
        }
        kept.erase(std::remove_if(kept.begin(), kept.end(), [&](int32_t id) { return !(scaled(id) >= limit); }), kept.end());
    }

    // False where a cut is too close to call.
    bool filter() {
        if (s.top_n_sigma > 0.0 && !top_n_sigma()) return false;
        if (s.top_k > 0) top_k();
        if (s.top_p < 1.0 && !top_p()) return false;
        if (s.min_p > 0.0) min_p();
        return true;
    }

    int draw() {
        int chosen = best;
        double score = scaled(best) + gumbel(s, best);
        const auto consider = [&](int token) {
            const double without = scaled(token);
            if (token == best || !(without + kGumbelMax >= score) || !allowed(token)) return;
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
                static_cast<float>(1.0 / s.temperature), static_cast<float>(score), s.seed, s.index, s.sample, s.stream, ids);
            for (int i = 0; i < count; ++i) consider(ids[i]);
        }
        return chosen;
    }
};

}  // namespace

double weight_of(const float* x, int n, double temperature, double top, const Kernels& kernels) {
    double weights[kStretch + 8];
    kernels.weigh(x, n, temperature, top, weights);
    std::fill(weights + n, weights + (n + 7) / 8 * 8, 0.0);
    double sums[8] = {};
    for (int i = 0; i < n; i += 8)
        for (int lane = 0; lane < 8; ++lane) sums[lane] += weights[i + lane];
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

double gumbel(const Sampling& s, int token) {
    const double u = (static_cast<double>(philox_word(s, static_cast<uint32_t>(token))) + 0.5) * 0x1p-32;
    return -natural_log(-natural_log(u));
}

void Edit::advance(int32_t token) {
    if (kind != Penalties) return;
    const auto known = std::find(output.begin(), output.end(), token);
    if (known != output.end()) {
        values[static_cast<size_t>(known - output.begin())] += 1.0f;
        return;
    }
    output.push_back(token);
    values.push_back(1.0f);
}

int greedy(const Best& best) {
    if (best.nan || best.value == kInfinity) return kNaN;
    return best.value == -kInfinity ? kNoneAllowed : best.index;
}

int choose(const float* logits, int vocab, const Best* known, const std::vector<Edit>& edits, const Sampling& sampling,
    const Kernels& kernels, Workspace& w) {
    bool masked = restrict(edits, vocab, w.mask);
    const auto changes = [](const Edit& edit) { return !edit.restricts(); };
    if (std::any_of(edits.begin(), edits.end(), changes)) {
        w.edited.assign(logits, logits + vocab);
        for (const Edit& edit : edits) apply(edit, w.edited);
        logits = w.edited.data();
        known = nullptr;
    }
    Best best = known ? *known : kernels.argmax(logits, vocab);
    if (masked && (best.nan || !allows(w.mask.data(), best.index))) {
        const Best all = best;
        best = {-kInfinity, 0, false};
        each(w.mask, [&](int token) {
            if (logits[token] > best.value) best = {logits[token], token, false};
        });
        // What is forbidden must not reach the kernels as NaN, as infinity or as an exponent that float64 has not.
        const double beyond = static_cast<double>(all.value) - best.value;
        if (sampling.temperature > 0.0 ? all.nan || !(beyond / sampling.temperature < 700.0) : all.nan) {
            std::vector<float> rest(static_cast<size_t>(vocab), -kInfinity);
            each(w.mask, [&](int token) { rest[static_cast<size_t>(token)] = logits[token]; });
            w.edited = std::move(rest);
            logits = w.edited.data();
            best = kernels.argmax(logits, vocab);
            masked = false;
        }
    }
    const int likeliest = greedy(best);
    if (sampling.temperature == 0.0 || likeliest < 0) return likeliest;
    if (!w.ids) w.ids.reset(new int32_t[static_cast<size_t>(vocab)]);
    Choice choice{logits, vocab, sampling, kernels, best.index, w.ids.get(), masked ? w.mask.data() : nullptr, false, {}};
    if (masked && count(w.mask) * 16 < vocab) {  // few enough to go through one by one
        choice.narrowed = true;
        each(w.mask, [&](int token) {
            if (logits[token] > -kInfinity) choice.kept.push_back(token);
        });
    }
    return choice.filter() ? choice.draw() : kUndecided;
}

std::vector<int32_t> survivors(const float* logits, int n, const Sampling& sampling, const Kernels& kernels) {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    Choice choice{logits, n, sampling, kernels, kernels.argmax(logits, n).index, ids.data(), nullptr, false, {}};
    choice.filter();
    if (!choice.narrowed) choice.kept.assign(ids.data(), ids.data() + choice.at_least(0, n, std::numeric_limits<float>::lowest()));
    return choice.kept;
}

}  // namespace outpace
