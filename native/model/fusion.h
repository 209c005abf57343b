// What a learned drafter makes of its target's hidden states: one product, its features.
#pragma once

#include <vector>

#include "runtime/scratch.h"
#include "weights/matrix.h"

namespace outpace {

class Model;

class Fusion {
public:
    // `matrix` [hidden, layers * hidden] under `norms`: none, one for each layer [hidden], or one over all [layers * hidden].
    // Takes the model's lock. Throws std::invalid_argument for what does not fit together.
    Fusion(Model& model, Matrix matrix, std::vector<std::vector<float>> norms);

    // Features [n][hidden] of hidden states, each [layers][hidden]. The lock is the caller's.
    void run(Model& model, const std::vector<const float*>& hidden_states, float* out);
    void run(Model& model, const float* hidden_states, int n, float* out);

    size_t wide() const { return static_cast<size_t>(matrix_.cols); }  // numbers that a position has in its hidden states
    size_t bytes() const { return matrix_.bytes(); }
    bool like(const Fusion& other) const { return matrix_.cols == other.matrix_.cols && norms_.size() == other.norms_.size(); }

private:
    Matrix matrix_;
    std::vector<std::vector<float>> norms_;
    Buffer<float> fused_;
};

}  // namespace outpace
