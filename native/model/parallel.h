// A block-parallel drafter (DSpark, arXiv 2607.05147) on its target's runtime: a whole draft in one call.
//
// The block stands at the pending token: that one and mask tokens behind it, which all see each other and what the row has of
// contexts, the network's keys and values of the target's hidden states. Contexts are kept, blocks are gone when the call
// returns. A low-rank head adds, slot by slot, what the token before makes likely. A draft is the likeliest tree by what the slots
// say (best first, DDTree, arXiv 2604.12989), or a chain.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "drafting/draft.h"
#include "model/draft_network.h"
#include "model/grow.h"

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
        // Gated: [rank, hidden + rank], of the slot's state and what is known of the token before, and then `after` reads that by
        // its sigmoid. Recurrent: [3 rank, 2 rank + hidden], of what the slot before has left, the token before and the slot's
        // state: gate, candidate, and what `after` reads. None: `after` reads what is known of the token. [rank, hidden], without
        // a bias: it reads that times what this makes of the slot's state.
        Matrix mix = {};
        std::vector<float> mix_bias = {};
        int candidates = 0;  // the likeliest tokens of each slot, which alone are drafted; 0: all are
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
        int nodes = 1, branch = 1;  // of a draft: 1: a chain, otherwise a tree of at most so many nodes
    };
    // Gains are of the confidence head's where that is there, for greedy rows. Throws NotFinite.
    std::vector<Draft> draft(const std::vector<Ask>& asks);

    // Without a choice: normed states [asks * slots][hidden] and logits [asks * slots][outputs] of the first `slots` of each.
    std::pair<std::vector<float>, std::vector<float>> states(const std::vector<Ask>& asks);
    // What tokens [n] before slots of states [n][hidden] add to their logits [n][outputs]; `left` [n][rank]: what the slots before
    // have left, which becomes what these leave. What is known of the tokens [n][rank] goes to `known`.
    std::vector<float> bias(const std::vector<int32_t>& tokens, const float* states, std::vector<float>& left, std::vector<float>& known);

    int slots() const { return shape_.block - !shape_.from_anchor; }
    int rank() const { return markov_ ? markov_->before.cols : 0; }
    size_t bytes() const { return DraftNetwork::bytes() + (markov_ ? markov_->after.bytes() : 0); }

private:
    void check(const std::vector<Ask>& asks) const;
    void forward(const std::vector<Ask>& asks);
    void keep_candidates(float* logits) const;
    // before_ of tokens, left_ (which is what the slots before have left, on entry), and what `after` reads, encoded.
    void encode(const std::vector<int32_t>& tokens, const std::vector<const float*>& states);
    struct Row;   // an ask under way
    struct Slot;  // after a node of one
    std::vector<std::vector<RankedToken>> decide(std::vector<Row>& rows, const std::vector<Slot>& slots);
    float accepted(size_t place, size_t before) const;
    float* logits_of(size_t place) { return logits_.get() + place * static_cast<size_t>(stride_); }

    const std::vector<float> norm_;
    const Shape shape_;
    const std::optional<Markov> markov_;
    const std::optional<Confidence> confidence_;
    const int64_t stride_;
    std::vector<float> normed_;  // of the last forward's wanted tokens [place][hidden]
    Buffer<float> logits_;       // [place][stride]
    // Of the tokens that `encode` was given [n][rank]: what is known of them, what the slots before have left, and then these.
    std::vector<float> before_, left_;
    Buffer<uint8_t> acts_;  // what markov_->after reads, or markov_->mix, encoded
    Buffer<float> mixed_;   // [n][outputs of markov_->mix]
    Buffer<float> biased_;  // [n][stride], where filters want all of a slot's logits
};

}  // namespace outpace
