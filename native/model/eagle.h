// An EAGLE-3 drafter (arXiv 2503.01840; 3.1: 2605.09992) on its target's runtime, or a layer of the target's own that only drafts
// (MTP, arXiv 2412.19437): a whole draft in one call.
//
// An entry reads the target's hidden states of a position and the embedding of the token after it; what it gives predicts
// the token after that. Real entries are kept. Predicted ones read the entry before them instead of the target, and are gone
// when the call returns.
#pragma once

#include <memory>
#include <vector>

#include "drafting/draft.h"
#include "model/draft_network.h"
#include "model/grow.h"

namespace outpace {

constexpr int kMostBranch = 64, kMostNodes = 4096, kMostLevels = 64;

class Eagle : public DraftNetwork {
public:
    // `model`: its first layer reads embeddings beside features. `norm_output`: what the next entry reads is normed as what the
    // head reads. Throws std::invalid_argument for what does not fit together.
    Eagle(std::shared_ptr<Model> model, Matrix fuse, std::vector<std::vector<float>> norms, std::vector<int32_t> tokens, bool norm_output);

    // A row's new real entries, and what is to be drafted after the last one.
    struct Ask {
        int row;                      // of the model's cache
        std::vector<int32_t> tokens;  // [n]
        const float* states;          // the target's [n][layers][hidden]
        int nodes = 0, levels = 0, branch = 0;  // nodes 0: nothing is drafted
        Sampling sampling = {};                 // of the first node
        double floor = 0.0;                     // of the chances of nodes that have children
    };
    // Appends the entries and drafts for each ask, a row once at the most. Throws std::invalid_argument, std::out_of_range,
    // MemoryLimit, NotFinite; then every row is as it was. A row's draft depends on that row and its ask alone.
    std::vector<Draft> draft(const std::vector<Ask>& asks);

    // Features [n][hidden] of the target's states [n][layers][hidden]. It takes the lock.
    std::vector<float> fuse(const float* states, int n) {
        std::lock_guard<std::mutex> lock(model_->lock());
        std::vector<const float*> each;
        for (int t = 0; t < n; ++t) each.push_back(states + static_cast<size_t>(t) * wide());
        return features(each);
    }

private:
    struct Row;   // an ask under way
    struct Step;  // one token of a level's forward

    void check(const std::vector<Ask>& asks);
    void store(const float* features);
    std::vector<std::vector<RankedToken>> level(
        const std::vector<Row>& rows, const std::vector<Step>& steps, const float* features, Result& result);

    const bool norm_output_;
};

}  // namespace outpace
