// Rows of a draft model's own cache, and what the model drafts from them in native steps: drafters/forward/model.py.
//
// A draft is a chain of what the model itself chooses, each node with the model's probability. Where the policy chooses how
// much is drafted, a chain ends at the price, and a second choice that is near stands beside the first.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "drafting/drafter.h"
#include "model/walk.h"

namespace outpace {

struct DraftRows {  // by the target's row
    struct Row {
        int cached;                // the draft model's row
        std::vector<int32_t> fed;  // tokens that its cache holds, one a position,
        size_t start = 0;          // of which the first is this one of the target's row
    };
    std::map<int64_t, Row> rows;
};

class ModelDrafter : public NativeDrafter {
public:
    // `vocab`: the target's; a row that has committed a token that `model` lacks gets no drafts. `max_length`: positions of a row.
    // `catch_up`: most tokens that adaptive rows which lack more read in a step, together; `least`: of one; `piece`: of a row whose
    // size is fixed.
    ModelDrafter(
        std::shared_ptr<Model> model, std::shared_ptr<DraftRows> rows, int vocab, int max_length, int catch_up, int least, int piece)
        : model_(std::move(model)),
          rows_(std::move(rows)),
          vocab_(vocab),
          max_length_(static_cast<size_t>(max_length)),
          catch_up_(static_cast<size_t>(catch_up)),
          least_(static_cast<size_t>(least)),
          piece_(static_cast<size_t>(piece)) {}

    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    bool stepwise() const override { return true; }

private:
    struct Chain {
        const Asked* asked;
        Draft* tree;
        DraftRows::Row* row;
        const int32_t* next;  // tokens that the row's cache lacks
        size_t left;
        Chooser chooser;
        size_t depth;  // most levels
        size_t grown = 0;  // levels that it has
        int32_t end = -1;  // its last node
        double path = 1.0;  // the chance of that one's path
        int choice = kUndecided, rival = kUndecided;  // at this level
        double chance = 0.0, near = 0.0;  // theirs
    };
    Chain begin(const Asked& asked, Draft& tree);
    // Most tokens that a row reads in this step. The policy does not plan the steps of a row whose size is fixed.
    size_t most(const Chain& chain) const { return chain.asked->adaptive ? share_ : piece_; }
    // Rows that lack more read as much; they draft in a later step.
    void read_behind(std::vector<Chain>& chains);
    std::unique_ptr<Result> feed(std::vector<Chain>& chains);
    std::unique_ptr<Result> forward(std::vector<Chain>& chains, bool last);
    int choose(const Chain& chain, const Result& result, int i, Workspace& workspace) const;
    void rate(Chain& chain, const Result& result, int i) const;
    void grow(Chain& chain) const;

    const std::shared_ptr<Model> model_;
    const std::shared_ptr<DraftRows> rows_;
    const int vocab_;
    const size_t max_length_, catch_up_, least_, piece_;
    size_t share_ = 0;  // of `catch_up_`, for each row of this step
};

}  // namespace outpace
