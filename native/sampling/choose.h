// From logits to a choice where the logits lie: the same token that sampling.py's `choose` gives on them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/table.h"

namespace outpace {

// A logit rule of rules.py with its state.
struct Edit {
    enum Kind { Penalties, Bias, Allowed, Mask } kind = Bias;
    std::vector<int32_t> ids;     // distinct prompt tokens, ascending; biased or allowed tokens
    std::vector<int32_t> output;  // penalties: distinct output tokens
    std::vector<float> values;    // counts of output tokens, or biases
    float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;
    std::vector<uint32_t> bits;   // mask: bit t % 32 of word t / 32 allows token t

    bool restricts() const { return kind == Allowed || kind == Mask; }
    void advance(int32_t token);  // one output token further; see Penalties.advance
};

// What a choice needs of a request: parameters as params.py defines them, then the noise's address. Nothing given: greedy.
struct Sampling {
    double temperature = 0.0;  // 0: greedy
    double top_n_sigma = 0.0;  // 0: off
    int top_k = 0;             // 0: off
    double top_p = 1.0;        // 1: off
    double min_p = 0.0;        // 0: off
    uint64_t seed = 0;
    uint32_t sample = 0, index = 0, stream = 0;

    bool filters() const { return temperature > 0.0 && (top_n_sigma > 0.0 || top_k > 0 || top_p < 1.0 || min_p > 0.0); }

    // visit(name, field) for every field, under the names that Python has.
    template <class Visit>
    void each_field(const Visit& visit) {
        visit("temperature", temperature);
        visit("top_n_sigma", top_n_sigma);
        visit("top_k", top_k);
        visit("top_p", top_p);
        visit("min_p", min_p);
        visit("seed", seed);
        visit("sample", sample);
        visit("index", index);
        visit("stream", stream);
    }
};

// Memory that choices over one vocabulary share.
struct Workspace {
    std::unique_ptr<int32_t[]> ids;
    std::vector<float> edited;
    std::vector<uint32_t> mask;
};

constexpr int kStretch = 256;  // logits that are looked at together: what they weigh is summed within one, then over all

// Sum of e^(x / temperature - top) over [n], n <= kStretch.
double weight_of(const float* x, int n, double temperature, double top, const Kernels& kernels);

enum : int { kNoneAllowed = -1, kNaN = -2, kUndecided = -3 };

// The Gumbel noise of a token at the sampling's output index, as noise.py has it.
double gumbel(const Sampling& sampling, int token);

// The argmax as a choice: kNaN for NaN or infinity.
int greedy(const Best& best);

// Indices of logits [n] that the filters leave, ascending. Those nearest to a filter's edge may be on either side of it.
std::vector<int32_t> survivors(const float* logits, int n, const Sampling& sampling, const Kernels& kernels);

// The token, or one of the codes above. `best`: the argmax of `logits` where it is known. Logits are copied for rules that
// change them; rules that only forbid are looked up as bits. Throws std::out_of_range for an id outside the vocabulary,
// std::invalid_argument for a mask of another one.
int choose(const float* logits, int vocab, const Best* best, const std::vector<Edit>& edits, const Sampling& sampling,
    const Kernels& kernels, Workspace& workspace);

}  // namespace outpace
