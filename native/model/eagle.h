// An EAGLE-3 drafter (arXiv 2503.01840; 3.1: 2605.09992) on its target's runtime: a whole draft in one call.
//
// An entry reads the target's hidden states of a position and the embedding of the token after it; what it gives predicts
// the token after that. Real entries are kept. Predicted ones read the entry before them instead of the target, and are gone
// when the call returns.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "model/fusion.h"
#include "model/grow.h"
#include "model/model.h"
#include "sampling/shortlist.h"

namespace outpace {

constexpr int kMostBranch = 64, kMostNodes = 4096, kMostLevels = 64;

// The network's logits are NaN or infinite.
struct NotFinite : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Eagle {
public:
    // `model`: its first layer reads embeddings beside features. `fuse` [hidden, taps * hidden] makes features of taps, under
    // `norms`: none, one for each tap [hidden], or one over all [taps * hidden]. `tokens` [outputs of the model]: the target's
    // ids, ascending. `norm_output`: what the next entry reads is normed as what the head reads.
    // Throws std::invalid_argument for what does not fit together.
    Eagle(std::shared_ptr<Model> model, Matrix fuse, std::vector<std::vector<float>> norms, std::vector<int32_t> tokens, bool norm_output);

    // A row's new real entries, and what is to be drafted after the last one.
    struct Ask {
        int row;                      // of the model's cache
        std::vector<int32_t> tokens;  // [n]
        const float* taps;            // [n][taps][hidden]
        int nodes, levels, branch;    // nodes 0: nothing is drafted
        Sampling sampling;            // of the first node; temperature 0: greedy
    };
    struct Draft {
        std::vector<int32_t> tokens, parents;
        std::vector<float> chances;
    };
    // Appends the entries and drafts for each ask, a row once at the most. Throws std::invalid_argument, std::out_of_range,
    // MemoryLimit, NotFinite; then every row is as it was. A row's draft depends on that row and its ask alone.
    std::vector<Draft> draft(const std::vector<Ask>& asks);

    // The cache's row of a row of the target's, which is made where it is not there, and given up again. They take the lock.
    int row(int of) const {  // -1: it is not there
        const auto found = rows_.find(of);
        return found == rows_.end() ? -1 : found->second;
    }
    bool take(int of);  // whether it was made
    void drop(int of);
    const std::map<int, int>& rows() const { return rows_; }

    // Drafts with the weights of `other` from now on, which gets these. Rows keep the keys and values that they have. It
    // takes the lock. Throws std::invalid_argument where the two differ in shape or words, or `other` has rows, and
    // MemoryLimit; then nothing has changed.
    void exchange(Eagle& other);

    // Features [n][hidden] of taps [n][taps][hidden].
    void fuse(const float* taps, int n, float* out) { fusion_.run(*model_, taps, n, out); }

    Model& model() { return *model_; }
    int taps() const { return static_cast<int>(fusion_.wide()) / model_->hidden(); }
    size_t bytes() const { return model_->weights().bytes() - model_->weights().embedding.bytes() + fusion_.bytes(); }

    enum Phase { kFuse, kStore, kLevels, kRest, kPhases };
    static const char* const kPhaseNames[kPhases];
    std::array<double, kPhases> take_timings();  // seconds since the last call

private:
    struct Row;   // an ask under way
    struct Step;  // one token of a level's forward

    void check(const std::vector<Ask>& asks);
    BatchView view(size_t tokens, const float* features) const;
    void store(const float* features);
    void level(const std::vector<Step>& steps, const float* features, Result& result);
    std::vector<Growth::Child> children(const Step& step, size_t at) const;

    std::shared_ptr<Model> model_;
    Fusion fusion_;
    const std::vector<int32_t> tokens_;
    const bool norm_output_;
    const int stretches_;  // of the head's rows
    std::vector<std::vector<Shortlist>> lists_;  // [thread][token of a chunk]
    std::vector<Shortlist> merged_;              // [step]
    std::vector<Mass> masses_;                   // [step][stretch]
    std::array<double, kPhases> seconds_{};
    std::map<int, int> rows_;  // the target's row -> the cache's
};

}  // namespace outpace
