// One step of decoding: drafts, the policy, one forward with prompts' chunks beside the rows, verdicts, and the rows' cache.
//
// `advance` runs one stage after the other, each for all rows at once. Where something is left that only the caller can do (a
// drafter, rule or model of another kind), `advance` says so, the caller completes those rows, and goes on. engine/step.py is
// such a caller. Between two forwards every line of code and data is cold, so what counts is how much different code runs.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "drafting/lookups.h"
#include "drafting/policy.h"
#include "model/walk.h"
#include "step/draft.h"

namespace outpace {

// What stays as it is of a sequence while it has its row.
struct StepRow {
    int32_t row;
    int64_t prompt;                // tokens of it that are the prompt's
    bool drafts;                   // whether some drafter serves the row
    bool adaptive;                 // whether the policy chooses how much, not the request
    NativeDrafter* drafter;               // null: the caller's
    bool natively;                 // whether `drafter` drafts for the row; if not, the caller does
    std::vector<int> sources;      // what the drafter's source numbers stand for
    bool reads;                    // its drafter reads hidden states
    bool ruled;                    // its rules may edit a draft
    bool coupled;                  // its acceptance; if not, the caller verifies it
    bool watched;                  // the caller wants a look at its logits
    Sampling sampling;             // `index` aside
    Policy::Kind kind;

    bool listens() const { return drafter && !drafter->hidden_layers().empty(); }
};

enum class Rules { kNone, kKnown, kTested, kForeign };  // of a row: `Chooser` has all; all but some that can test a token; neither

struct RowNow {  // a decoding row in this step
    const StepRow* fixed;
    const int32_t* tokens;  // committed; the last one is pending
    size_t length;
    int most, asked, levels;
    double floor = 0.0;
    Rules rules;
    Chooser chooser;
    bool drawn = false;    // its nodes were sampled under rejection: none may be dropped
    bool trimmed = false;  // whether `kept` is another draft than `proposed`
    Draft proposed, kept;
    Verdict verdict;

    const Draft& draft() const { return trimmed ? kept : proposed; }
};

struct ChunkNow {  // tokens `first` ... of a row's prompt, whose KV is written in this step
    const StepRow* fixed;
    int32_t first;
    std::vector<int32_t> tokens;  // and the one that follows them
    bool wanted;                  // whether logits after them are

    size_t count() const { return tokens.size() - 1; }
};

enum class Stage { kPlan, kPropose, kRules, kTrim, kForward, kVerify, kSettle, kDone };

class Step {
public:
    struct Failed {  // a drafter, with the rows that it was asked for
        std::vector<int> rows;
        std::string why;
    };

    // `layers`: of the target; `hidden_layers`: those whose outputs drafters read.
    Step(int vocab, int layers, std::vector<int> hidden_layers)
        : vocab_(vocab), layers_(layers), hidden_layers_(std::move(hidden_layers)) {}
    Step(const Step&) = delete;

    // A new step: `rows` and `chunks` are to be filled. `model` null: the caller computes. `policy` null: every row drafts what
    // it may.
    void begin(Model* model, Policy* policy);
    std::vector<RowNow> rows;
    std::vector<ChunkNow> chunks;
    void end() { rows.clear(), chunks.clear(), result_.reset(), stage_ = Stage::kDone; }

    Stage stage() const { return stage_; }
    // Whether the next stage may take long.
    bool computes() const;
    // Runs the next stage; whether nothing is left of it for the caller, who else completes `open` (and reads `failed`).
    bool advance();
    const std::vector<int>& open() const { return open_; }
    const std::vector<Failed>& failed() const { return failed_; }
    const std::vector<std::pair<int, std::string>>& lost() const { return lost_; }  // rows whose cache could not be settled

    // What callers complete. They throw std::invalid_argument.
    void put(size_t i, Draft draft);                                     // kPropose
    void lead(size_t i, const std::vector<int32_t>& tokens, int source);  // kRules: tokens that must follow come first
    void keep(size_t i, const std::vector<int32_t>& nodes);              // kRules
    void decide(size_t i, Verdict verdict);                              // kVerify
    // Rows that the caller has to look at, once it has walked what it can in bulk.
    void reopen();

    bool levelled() const { return levelled_; }
    int threads() const { return threads_; }
    const std::shared_ptr<Result>& result() const { return result_; }
    const std::array<int64_t, 3>& calls() const { return calls_; }     // of drafters, of the model, and for all rows' verdicts, ever
    const std::array<double, 3>& seconds() const { return seconds_; }  // of drafting, forward and verdicts
    Policy* policy() const { return planned_ ? policy_ : nullptr; }  // null: it had no say

    // The packed batch; see Batch in models/base.py.
    std::vector<int32_t> token, row, position, parent, starts, wanted;
    std::vector<uint8_t> hidden_rows;

    // What the policy makes of the step that was: seconds that drafting took, and all else.
    void learn(double draft, double body);
    // Drafters hear what became final: (row of the step, how many of its verdict's tokens), where rows of chunks follow those
    // that decode, and have all their tokens. Throws what they throw. Returns those that want to read ahead.
    std::vector<NativeDrafter*> observe(const std::vector<std::pair<int, int>>& heard);

private:
    using Clock = std::chrono::steady_clock;

    bool plan();
    bool propose();
    void ask(NativeDrafter& drafter, const std::vector<size_t>& at);
    bool edit();
    bool trim();
    bool forward();
    bool verify();
    bool settle();
    void pack();
    Final gained(size_t i, int count) const;
    Final written(size_t j) const;

    const int vocab_, layers_;
    const std::vector<int> hidden_layers_;
    Model* model_ = nullptr;
    Policy* policy_ = nullptr;
    bool planned_ = false, levelled_ = false;
    Stage stage_ = Stage::kDone;
    std::vector<int> open_;
    std::vector<Failed> failed_;
    std::vector<std::pair<int, std::string>> lost_;
    std::array<double, 3> seconds_{};
    std::array<int64_t, 3> calls_{};
    int threads_ = 0;
    std::shared_ptr<Result> result_;
    std::vector<Policy::View> views_;
    std::vector<Asked> asked_;
    std::vector<Draft> found_;
    std::vector<int32_t> slots_;
};

}  // namespace outpace
