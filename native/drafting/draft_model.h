// Rows of a draft model's own cache, and the chains that the model drafts from them in native steps: drafters/forward/model.py.
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
        std::vector<int32_t> fed;  // tokens that its cache holds, one a position
    };
    std::map<int64_t, Row> rows;
};

class ModelDrafter : public NativeDrafter {
public:
    // `vocab`: the target's; a row that has committed a token that `model` lacks gets no drafts. `max_length`: positions of a row. `catch_up`: most tokens of one row in one forward.
    ModelDrafter(std::shared_ptr<Model> model, std::shared_ptr<DraftRows> rows, int vocab, int max_length, int catch_up)
        : model_(std::move(model)),
          rows_(std::move(rows)),
          vocab_(vocab),
          max_length_(static_cast<size_t>(max_length)),
          catch_up_(static_cast<size_t>(catch_up)) {}

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
        int choice = kUndecided;
    };
    Chain begin(const Asked& asked, Draft& tree);
    std::unique_ptr<Result> feed(std::vector<Chain>& chains);
    std::unique_ptr<Result> forward(std::vector<Chain>& chains, bool last);
    int choose(const Chain& chain, const Result& result, int i, Workspace& workspace) const;

    const std::shared_ptr<Model> model_;
    const std::shared_ptr<DraftRows> rows_;
    const int vocab_;
    const size_t max_length_, catch_up_;
};

}  // namespace outpace
