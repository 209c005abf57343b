// The likeliest few of a drafter's logits, and what all of them weigh together, from stretches that threads take in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/choose.h"

namespace outpace {

constexpr int kRivals = 16;    // scores, at the least, among which noise leaves the choice open

// What a stretch's logits weigh: sum of e^(logit - top).
struct Mass {
    float top;  // NaN: one of them is NaN
    double sum;
};

// Of all stretches together, added in their order. A top of NaN: a logit is NaN or infinite.
Mass whole(const Mass* stretches, int count);

// log of the sum of e^logit over logits [n], whose argmax is `best`: what log-softmax takes away from each (`token_logprob` of
// sampling.py). NaN where a logit is NaN or infinity, or all are -infinity.
double log_sum(const float* logits, int n, const Best& best, const Kernels& kernels);

// The first few by score (logit, or, with a temperature, logit / temperature + the request's noise), ties to the lower place.
class Shortlist {
public:
    struct Entry {
        double score;
        float logit;
        int32_t place;  // among the draft vocabulary
    };

    void begin(int most);  // empties it, and takes the memory that `consider` needs
    // Of each entry, the chance that it is what the target chooses: without noise its probability, e^(logit - top) of `whole`; with
    // noise, which the target will use too, e^score over the sum of that in the list.
    std::vector<double> shares(const Mass& whole, bool sampled) const;
    const std::vector<Entry>& entries() const { return entries_; }

    // Logits x [n], n <= kStretch, of places first, first + 1 ... with the target's ids `tokens` [n], ascending. Returns their
    // mass; its sum only where there is no noise and it is `weighed`.
    Mass consider(
        const float* x, int first, int n, const int32_t* tokens, const Sampling& sampling, const Kernels& kernels, bool weighed = true);
    void add(const Shortlist& other) {
        for (const Entry& entry : other.entries_) insert(entry);
    }

    void insert(const Entry& entry);

private:
    bool full() const { return static_cast<int>(entries_.size()) == most_; }

    int most_ = 0;
    std::vector<Entry> entries_;  // best first
};

}  // namespace outpace
