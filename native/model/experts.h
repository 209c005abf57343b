// Which experts the tokens of a chunk go to, and the order in which their pairs (token, choice) are computed.
#pragma once

#include <vector>

#include "model/weights.h"

namespace outpace {

constexpr int kGather = 32;  // most tokens of an expert whose inputs a thread brings together at once

class Routes {
public:
    struct Group {  // an expert's pairs: `count` from `first` on, by token
        int expert, first, count;
    };
    // Of n tokens; `logits` [n][stride]: what the router's product gave. A token's choices depend on its logits alone.
    void plan(const Experts& experts, const float* logits, int stride, int n);

    const std::vector<Group>& groups() const { return groups_; }
    const int* tokens(const Group& group) const { return tokens_.data() + group.first; }
    // Of a token's choice k, the router's first one first.
    int expert(int token, int k) const { return chosen_[at(token, k)]; }
    int place(int token, int k) const { return places_[at(token, k)]; }  // among the pairs
    float weight(int token, int k) const { return weights_[at(token, k)]; }
    float shared(int token) const { return shared_[static_cast<size_t>(token)]; }  // the shared expert's weight

private:
    size_t at(int token, int k) const { return static_cast<size_t>(token) * used_ + static_cast<size_t>(k); }
    void bar_groups(const Experts& experts);
    void choose(const Experts& experts, const float* logits, int* chosen, float* weights);

    size_t used_ = 0;
    std::vector<Group> groups_;
    std::vector<int> tokens_, places_, chosen_, starts_;
    std::vector<float> weights_, shared_, values_, scores_, keys_;
};

}  // namespace outpace
