// An EAGLE-3 drafter (arXiv 2503.01840; 3.1: 2605.09992) on its target's runtime, or a layer of the target's own that only drafts
// (MTP, arXiv 2412.19437): a whole draft in one call.
//
// An entry reads the target's hidden states of a position and the embedding of the token after it; what it gives predicts
// the token after that. Real entries are kept. Predicted ones read the entry before them instead of the target, and are gone
// when the call returns. Under masks (P-EAGLE) predicted entries read a mask instead, so that one forward gives all depths; then
// the tree is the likeliest by what each depth says alone (DDTree, arXiv 2604.12989).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "drafting/draft.h"
#include "model/draft_network.h"
#include "model/grow.h"

namespace outpace {

constexpr int kMostBranch = 64, kMostNodes = 4096, kMostLevels = 64;

class Eagle : public DraftNetwork {
public:
    struct Mask {
        int32_t token;
        std::vector<float> states;  // [layers][hidden], in place of the target's
    };
    // `model`: its first layer reads embeddings beside features. `norm_output`: what the next entry reads is normed as what the
    // head reads. Throws std::invalid_argument for what does not fit together.
    Eagle(std::shared_ptr<Model> model, Matrix fuse, std::vector<std::vector<float>> norms, std::vector<int32_t> tokens, bool norm_output,
        const std::optional<Mask>& mask);

    // A row's new real entries, and what is to be drafted after the last one.
    struct Ask {
        int row;                      // of the model's cache
        std::vector<int32_t> tokens;  // [n]
        const float* states;          // the target's [n][layers][hidden]
        // nodes 0: nothing is drafted. Under masks a branch above 1 stands for as many as there are nodes.
        int nodes = 0, levels = 0, branch = 0;
        Sampling sampling = {};                 // of the first node
        double floor = 0.0;                     // of the chances of nodes that have children
    };
    // Appends the entries and drafts for each ask, a row once at the most. Throws std::invalid_argument, std::out_of_range,
    // MemoryLimit, NotFinite; then every row is as it was. A row's draft depends on that row and its ask alone.
    std::vector<Draft> draft(const std::vector<Ask>& asks);
    bool masked() const { return !masked_.empty(); }

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
    void grow(std::vector<Row>& rows, std::vector<float> last);
    void grow_at_once(std::vector<Row>& rows, const std::vector<float>& last);
    std::vector<std::vector<RankedToken>> level(
        const std::vector<Row>& rows, const std::vector<Step>& steps, const float* features, Result& result);

    const bool norm_output_;
    int32_t mask_ = -1;
    std::vector<float> masked_;  // features of a mask's states [hidden]; empty: there is none
};

}  // namespace outpace
