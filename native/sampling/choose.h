// From logits to a choice where the logits lie: the same token that sampling.py's `choose` gives on them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/table.h"

namespace outpace {

// A logit rule of rules.py with its state.
struct Edit {
    enum Kind { Penalties, Bias, Allowed } kind = Bias;
    std::vector<int32_t> ids;     // distinct prompt tokens, ascending; biased or allowed tokens
    std::vector<int32_t> output;  // penalties: distinct output tokens
    std::vector<float> values;    // counts of output tokens, or biases
    float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;
};

struct Sampling {
    double temperature;  // 0: greedy
    int top_k;           // 0: off
    double top_p;        // 1: off
    double log_min_p;    // -inf: off
    uint64_t seed;
    uint32_t sample, index, stream;
};

enum : int { kNoneAllowed = -1, kNaN = -2, kUndecided = -3 };

// The token, or one of the codes above. Throws std::out_of_range for an id outside the vocabulary.
int choose(const float* logits, int vocab, const std::vector<Edit>& edits, const Sampling& sampling, const Kernels& kernels);

}  // namespace outpace
