// The rows of one step: what is drafted for each, the batch that checks it, and the verdicts.
//
// Each function does one part of a step for all rows at once; engine/step.py calls them one after the other, and completes rows
// that need Python between two calls. Between two forwards every line of code and data is cold, so what counts is how much
// different code runs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "drafting/drafter.h"
#include "drafting/policy.h"
#include "model/walk.h"
#include "step/draft.h"

namespace outpace {

enum class Rules { kNone, kKnown, kTested, kForeign };  // of a row: `Chooser` has all; all but some that can test a token; neither

// A sequence while it has its row in the KV cache. What follows `kind` belongs to the present step.
struct Row {
    int32_t row;
    int64_t prompt;          // tokens of it that are the prompt's
    bool drafts;             // whether some drafter serves the row
    bool adaptive;           // whether the policy chooses how much, not the request
    NativeDrafter* drafter;  // null: the drafter is Python's
    bool natively;           // whether `drafter` drafts for the row; if not, Python does
    std::vector<int> sources;  // what the drafter's source numbers stand for
    bool reads;              // its drafter reads hidden states
    bool ruled;              // its rules may edit a draft
    bool coupled;            // its acceptance; if not, Python verifies it
    bool watched;            // Python wants a look at its logits
    Sampling sampling;       // `index` aside
    Policy::Kind kind;
    int64_t start = 0, read = 0;  // positions that its drafter has read beside the prompt's forwards; and from where on it reads

    const int32_t* tokens = nullptr;  // committed; the last one is pending. Null between two steps
    size_t length = 0;
    int most = 0, nodes = 0, depth = 0;  // nodes that it may draft, and that the policy leaves it, of so many levels
    double floor = 0.0;
    Rules rules = Rules::kNone;
    Chooser chooser;
    bool drawn = false;    // its nodes were sampled under rejection: none may be dropped
    bool trimmed = false;  // whether `kept` is another draft than `proposed`
    Draft proposed, kept;
    Verdict verdict;

    // A new step, in which it has so many tokens and may draft so many nodes.
    void begin(const int32_t* committed, size_t count, int most_nodes);
    const Draft& draft() const { return trimmed ? kept : proposed; }
    bool observes() const { return drafter && !drafter->hidden_layers().empty(); }
    bool undecided() const { return !verdict.decided() || rules >= Rules::kTested || watched; }
};

struct PromptChunk {  // tokens `first` ... of a row's prompt, whose KV is written in this step
    const Row* row;
    int32_t first;
    std::vector<int32_t> tokens;  // and the one that follows them
    bool wanted;                  // whether logits after them are

    size_t count() const { return tokens.size() - 1; }
};

class Rows {
public:
    struct Failed {  // a drafter, with the rows that it was asked for
        std::vector<int> rows;
        std::string why;
    };

    // `hidden_layers`: of the target, whose outputs drafters read.
    Rows(int vocab, std::vector<int> hidden_layers) : vocab_(vocab), hidden_layers_(std::move(hidden_layers)) {}
    Rows(const Rows&) = delete;

    std::vector<Row*> rows;
    std::vector<PromptChunk> chunks;
    void clear();

    // Drafts change until they are packed or decided; a batch is verified by a result of its own. Whatever comes out of order, or
    // names no row, throws std::invalid_argument or std::out_of_range.

    // How many nodes each row may be asked for. `policy` null: as many as it may have.
    void plan(Policy* policy);
    // Whether `propose` runs a network, and may take long.
    bool computes() const;
    // Native drafters draft for their rows. Returns those that did not.
    std::vector<Failed> propose();
    void put(size_t i, Draft draft);
    void drop(size_t i) { drafting(i).proposed = {}; }
    void lead(size_t i, const std::vector<int32_t>& tokens, int source);  // tokens that must follow come first
    void keep(size_t i, const std::vector<int32_t>& nodes);  // with their parents
    // The policy drops nodes that do not pay.
    void trim();

    // The packed batch; see Batch in models/base.py.
    std::vector<int32_t> token, row, position, parent, starts, wanted;
    std::vector<uint8_t> hidden_rows;
    void pack();
    BatchView batch(int layers) const;

    // Drafters get the likeliest tokens after their rows' nodes, and rows are decided, as far as C++ can.
    void verify(std::shared_ptr<Result> result);
    void decide(size_t i, Verdict verdict);
    // The rows' KV becomes what their verdicts say: all but the last token. Returns rows that could not be settled, and why.
    std::vector<std::pair<int, std::string>> settle(Model& model) const;
    // Slots of row i's path, and whether they are the first that were written.
    bool path_of(size_t i, std::vector<int32_t>& slots) const;

    const std::vector<int>& hidden_layers() const { return hidden_layers_; }
    bool limits_depth() const { return limits_depth_; }
    Policy* policy() const { return planned_ ? policy_ : nullptr; }  // null: it had no say
    Policy* given() const { return policy_; }  // that sizes drafts, whether or not a row drafts in this step
    const std::shared_ptr<Result>& result() const { return result_; }

    // What the policy makes of the step that was: seconds that drafting took, and all else; experts that were read, 0: not known.
    void learn(double draft, double body, double experts);
    // Native drafters get what became final: (row of the step, how many of its verdict's tokens), where rows of chunks follow
    // those that decode, and have all their tokens. Throws what they throw. Returns those that want to read ahead.
    std::vector<NativeDrafter*> observe(const std::vector<std::pair<int, int>>& gains);

private:
    Row& drafting(size_t i);  // a row whose draft may still change
    Policy& planned() const;  // the policy, whose step this still is
    void ask(NativeDrafter& drafter, const std::vector<size_t>& at);
    Final gained(size_t i, int count) const;
    Final written(size_t j) const;

    const int vocab_;
    const std::vector<int> hidden_layers_;
    Policy* policy_ = nullptr;
    bool planned_ = false, limits_depth_ = false;
    bool packed_ = false, final_ = false;  // the batch is made; drafts stay as they are
    std::shared_ptr<Result> result_;
    std::vector<Policy::View> views_;
    std::vector<Asked> asked_;
    std::vector<Draft> drafted_;
};

}  // namespace outpace
