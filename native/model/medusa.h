// Medusa's heads (arXiv 2401.10774) beside their target: residual blocks on its normed last hidden state, each for a token
// further ahead.
#pragma once

#include <memory>
#include <vector>

#include "model/model.h"
#include "sampling/ranking.h"

namespace outpace {

class Medusa {
public:
    struct Block {  // x + silu(W x + bias)
        Matrix weight;            // [hidden, hidden]
        std::vector<float> bias;  // [hidden], or empty
    };
    // `heads`: the blocks of each, as many of each; `rows` [outputs, hidden]: of each head, or one for all; `tokens` [outputs]:
    // the target's ids, ascending. Throws std::invalid_argument for what does not fit together.
    Medusa(std::shared_ptr<Model> target, std::vector<std::vector<Block>> heads, std::vector<Matrix> rows, std::vector<int32_t> tokens);

    Medusa(const Medusa&) = delete;

    // These take the target's lock.
    struct Ask {
        const float* state;      // the target's last layer's [hidden]
        int heads;               // that are asked for
        Sampling sampling = {};  // of the first head's token
    };
    // The likeliest `most` tokens of each head that is asked for, by ask; each ask's depend on it alone. Throws NotFinite.
    std::vector<std::vector<std::vector<RankedToken>>> draft(const std::vector<Ask>& asks, int most);
    // Logits [n][heads][outputs] of n states [hidden].
    std::vector<float> logits(const std::vector<const float*>& states);

    int heads() const { return static_cast<int>(heads_.size()); }
    int outputs() const { return static_cast<int>(ranking_.tokens().size()); }
    Model& target() { return *target_; }

private:
    void forward(const std::vector<const float*>& states, int heads);
    void encode(int head, const Matrix& reader, int count);
    template <class Work>
    void each_stretch(int count, int heads, const Work& work);
    const Matrix& rows_of(int head) const { return rows_[rows_.size() == 1 ? 0 : static_cast<size_t>(head)]; }

    std::shared_ptr<Model> target_;
    std::vector<std::vector<Block>> heads_;
    std::vector<Matrix> rows_;
    Ranking ranking_;
    std::vector<std::vector<float>> x_;   // of each head: outputs [count][hidden]
    std::vector<Buffer<uint8_t>> acts_;   // the same, encoded
    std::vector<std::vector<float>> y_;   // of each head: products [count][padded]
    std::vector<float> filtered_;         // logits of rows with filters [head][ask][outputs], where there are any
};

}  // namespace outpace
