// A block-parallel drafter (DSpark, arXiv 2607.05147) on its target's runtime: a whole draft in one call.
//
// The block stands at the pending token: that one and mask tokens behind it, which all see each other and what the row has of
// contexts, the network's keys and values of the target's hidden states. Contexts are kept, blocks are gone when the call
// returns. A low-rank head adds, slot by slot, what the token before makes likely.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "model/draft_network.h"

namespace outpace {

class Parallel : public DraftNetwork {
public:
    struct Shape {
        int block;         // tokens that a block has, at most kChunk
        int32_t mask;      // the token that stands where nothing is known
        bool from_anchor;  // the pending token's own place predicts, too
    };
    struct Markov {
        Matrix before;  // [vocabulary, rank]: what is known of the token before
        Matrix after;   // [outputs, rank]: what each token makes of that
    };
    struct Confidence {  // how likely a slot is accepted where those before it are
        std::vector<float> weight;  // [hidden], or [hidden + rank]: it reads the token before, too
        float bias;
    };
    // `fuse` and `norm` [hidden] make contexts' features of the target's states; `tokens` [outputs of the model]: the target's
    // ids, ascending. Throws std::invalid_argument for what does not fit together.
    Parallel(std::shared_ptr<Model> model, Matrix fuse, std::vector<float> norm, std::vector<int32_t> tokens, Shape shape,
        std::optional<Markov> markov, std::optional<Confidence> confidence);

    // All below take the lock. They throw std::invalid_argument, std::out_of_range, MemoryLimit, and then every row
    // is as it was. What a row gets depends on that row and its ask alone.

    struct Context {
        int row;                         // of the model's cache
        const float* states;             // the target's [n][layers][hidden]
        std::vector<int32_t> positions;  // [n], at which their keys are rotated
    };
    void read(const std::vector<Context>& contexts);  // appends them, a row once at the most

    struct Ask {
        int row;            // has contexts
        int32_t anchor;     // the pending token
        int position;       // where it stands
        int slots;          // that are wanted, at least 1
        Sampling sampling = {};  // of the first slot
    };
    // Each slot's token, and the chance of its own that it is accepted. Throws NotFinite.
    std::vector<std::vector<RankedToken>> draft(const std::vector<Ask>& asks);

    // Without a choice: normed states [asks * slots][hidden] and logits [asks * slots][outputs] of the first `slots` of each.
    std::pair<std::vector<float>, std::vector<float>> states(const std::vector<Ask>& asks);
    // What tokens [n] add to the next slot's logits: what is known of them [n][rank], and [n][outputs].
    std::pair<std::vector<float>, std::vector<float>> bias(const std::vector<int32_t>& tokens);

    int slots() const { return shape_.block - !shape_.from_anchor; }
    int rank() const { return markov_ ? markov_->before.cols : 0; }
    size_t bytes() const { return DraftNetwork::bytes() + (markov_ ? markov_->after.bytes() : 0); }

private:
    void check(const std::vector<Ask>& asks) const;
    void forward(const std::vector<Ask>& asks);
    void encode(const std::vector<int32_t>& tokens);
    struct Slot {      // of one ask
        size_t ask;
        size_t place;  // among the last forward's wanted tokens
        int index;     // within the block's slots
    };
    void decide(const std::vector<Ask>& asks, const std::vector<Slot>& slots, std::vector<std::vector<RankedToken>>& drafts);
    float accepted(size_t place, size_t before) const;
    float* logits_of(size_t place) { return logits_.get() + place * static_cast<size_t>(stride_); }

    const std::vector<float> norm_;
    const Shape shape_;
    const std::optional<Markov> markov_;
    const std::optional<Confidence> confidence_;
    const int64_t stride_;
    std::vector<float> normed_;  // of the last forward's wanted tokens [place][hidden]
    Buffer<float> logits_;       // [place][stride]
    std::vector<float> before_;  // of the tokens that `encode` was given [n][rank]
    Buffer<uint8_t> acts_;       // the same, encoded for markov_->after
};

}  // namespace outpace
