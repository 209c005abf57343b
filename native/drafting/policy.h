// The policy behind `--size auto`: how much each row drafts in a step. docs/policy.md says why; steps call it.
//
// Costs are in plain steps of the batch at hand, gains in tokens. What drafts have brought and cost is kept in a budget: once
// it is spent nothing is drafted, whatever is expected.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "drafting/chances.h"
#include "drafting/draft.h"
#include "drafting/step_costs.h"

namespace outpace {

class Policy {
public:
    struct Kind {  // of a row: what stays as it is for its whole life
        int64_t request;
        int sampling;    // requests whose acceptance may be pooled
        bool rejection;  // what was sampled may not be dropped
        int drafter;
        int levels;         // the source that takes a forward for every level; -1: none
        bool nodes, trims, reads;  // as in Python's DraftCost
        int64_t prompt, limit;     // its tokens, and the most that the row will ever have
    };
    struct View {  // a row in a step
        int64_t row;
        bool adaptive;
        int most;  // nodes
        double context;
    };
    enum class Why : uint8_t { Fixed, NoRoom, Rests, Nothing, Drafts, Try, Dear, Others, Spent, Plain, Levels, Long, Wide, Off, Unread };
    struct Decision {  // of a row, in a step
        int size = 0;
        Why why = Why::NoRoom;
        double expected = 0.0;              // speed over plain decoding of the best draft; 0: there was none
        double one = 0.0, two = 0.0;        // the numbers that decide, as `why` has them: see bindings/policy.cpp
        std::vector<double> worth;          // the chance of each proposed node's whole path
    };
    struct Seconds {
        double draft, body;
    };
    struct Found {  // what a row's lookups have drafted, before a network beside them is asked
        size_t place;  // of the row, in the step
        int64_t row;
        const Draft* draft;  // rated
        size_t at;           // as the caller counts
    };

    // Requests whose acceptance may be pooled.
    static int sampling_class(double temperature) { return temperature == 0 ? 0 : temperature < 0.9 ? 1 : 2; }

    bool explain = false;  // whether decisions hold what they rest on: for whoever reads them

    // `stretch`: the longest that a step with drafts may be, in plain steps of its rows, where it holds up several rows.
    Policy(CostTable cost, double stretch) : costs_(std::move(cost)), stretch_(stretch) {}

    bool knows(int64_t row, int64_t request) const;
    void admit(int64_t row, const Kind& kind);
    struct Reading {  // of a row's tokens, from `start` to the last: plain steps that it takes, and that it may take
        double start, takes, may;
        bool pays() const { return takes <= may; }
    };
    // What a drafter that `reads`, and has read [start, read) of a row that has said `said`, had better have read of its `end`
    // tokens, for what drafts then save: all, or from the middle on.
    Reading reading(const Kind& kind, double start, double read, double end, double said) const;
    void has_read(int64_t row, double start, double read);
    // It read so many tokens beside the step under way, whose other work took `body` seconds.
    void time_reading(const Kind& kind, int64_t tokens, double seconds, double body);

    // Rows that it knows, beside so many tokens of prompts. Afterwards `nodes` and `levels` say what to ask for. No rows: none
    // drafts, and those that decode count as tokens of prompts.
    void plan(const std::vector<View>& views, int64_t prefill);
    size_t planned() const { return count_; }  // rows of the step that is under way; 0 once it was learned from
    int nodes(size_t i) const { return steps_[i].nodes; }
    int levels(size_t i) const { return steps_[i].levels; }
    double floor(size_t i) const { return steps_[i].floor; }
    int64_t start(size_t i) const { return static_cast<int64_t>(std::max(steps_[i].start, 0.0)); }  // of what its drafter reads

    // A part of a composition has drafted this for a row: its paths' chances become what drafts of its source have been worth.
    void rate(size_t place, int64_t row, int source, Draft& draft);
    // Levels of rows whose lookups have drafted, once more, but no more than before: what a network adds to that has to pay for it.
    // Where a row has a floor its draft alone says how deep it goes, so there they only say whether to ask.
    void plan_beside(const std::vector<Found>& found);

    // `drafts`: of all rows. `drawn`: nodes carry q. Afterwards `kept` are the nodes to verify, ascending, with their parents.
    void trim(const std::vector<const Draft*>& drafts, bool drawn);
    const std::vector<int>& kept(size_t i) const { return steps_[i].kept; }
    const Decision& decision(size_t i) const { return steps_.at(i).decision; }

    // `paths`, `tokens`: of all rows, the accepted nodes of what was kept; and what was committed, a token more.
    using Of = std::vector<const std::vector<int32_t>*>;
    void learn(const Of& paths, const Of& tokens, const Seconds& seconds, double experts);
    void release(int64_t row);

    size_t rows() const { return rows_.size(); }
    double budget() const { return budget_; }
    double advantage() const { return advantage_; }
    const StepCosts& costs() const { return costs_; }

private:
    static constexpr double kSaves = 0.3;   // of `saves`, until it is known
    static constexpr double kUnread = 16.0;  // tokens that a network reads on the way, whatever it drafts
    static constexpr double kAlways = 0.5;  // plain steps that a draft may cost, and be charged where its size is not measured

    struct Row {
        Kind kind;
        std::map<int, std::array<double, 2>> bias;  // by source, of its first nodes and of deeper ones, in log-odds
        double lead = 0.0;             // plain steps that it is ahead of plain decoding
        double wall = 0.0;             // plain steps that it was in
        double value = 0.0;            // plain steps that asking saves, lately
        int rests = 0;                 // steps before its drafter is asked again
        bool drawn = false;            // its nodes are sampled, and may not be dropped
        double start = -HUGE_VAL, read = -HUGE_VAL;  // positions that its network has read, from the one to the other
        double first = -1.0, last = 0.0;  // positions in its first step and in its last one
    };
    struct Whole {  // drafts that are verified whole, of one drafter and kind of sampling: decayed sums
        double drafts = 0.0, gained = 0.0, nodes = 0.0;
    };
    struct Asking {  // what a drafter takes, in plain steps
        Ratios each;                  // a row
        std::array<Ratios, 8> level;  // a level, by doublings of the rows
        double value = 0.05;          // plain steps that a row's asking saves, lately: a guess that counts for
        int asked = 4;                // so many askings, and what they have saved since
        int64_t rested = 0;           // the step until which new rows do not ask either, where it is dear
        int rows = 0, levels = 0;     // in this step,
        int chosen = 0, deep = 0;     // and of them those whose size was chosen here
        bool behind = false;          // in this step it has to read more than what a step or two add:
        double unread = 0.0;          // so many tokens
        Ratios token;                 // plain steps for one of them
        double saves = kSaves;        // plain steps that a token of an answer saves, lately, once all before it is read
        double saved = -1.0;          // that in this step, over what lookups save that have drafted before it; -1: not planned
        bool dear() const { return value < each.low(); }
        const Ratios& at(int rows) const;  // of the batch most like it
        double forward(int rows) const { return at(rows).low(); }  // a level for so many rows; 0: not known
        double all(int rows, int levels) const { return rows * each.median() + levels * forward(rows); }
    };
    struct Word {  // what a drafter said of a node
        int path;  // that it stands at the end of, among those that were proposed
        int source;
        double said;  // given its parent; -1: nothing
        bool second;  // a child after another of the same drafter
        Chances::Table* table;
        Chance* learns;
        double chance = 0.0;  // given its parent, learned
    };
    struct Path {  // of tokens, which several drafters may have proposed
        int parent;
        int32_t token;
        int depth;  // of its end, from 0
    };
    struct Node {  // that was proposed
        int parent, path;
        double gain, chance;  // of its whole path; given its parent
    };
    struct Step {  // a row's part of the step that is under way
        View view;
        Row* row;  // null: released
        Kind kind;
        int nodes, levels, planned;  // planned: levels that were allowed
        double start;                // of what its drafter reads
        bool unread;                 // which is too much for what is left of the answer
        double floor;  // of a path's chance, for another level
        bool whole;  // its draft is verified whole, or not at all
        bool tried;  // levels are allowed to learn what they bring, whatever else was found
        std::vector<std::pair<int, double>> offers;  // what lookups beside its network found: depths, and chances of paths;
        std::vector<double> beside;                  // by depth, that one of them is right
        std::vector<Path> paths;
        std::vector<Word> words;
        std::vector<Node> draft;
        std::vector<int> kept;
        Decision decision;
    };
    struct Free {  // a node to choose
        double gain;
        int row, node;
        bool operator<(const Free& o) const { return gain != o.gain ? gain > o.gain : row != o.row ? row < o.row : node < o.node; }
    };
    struct Choice {  // how many of the best nodes, what they are worth, and the best speed that there is over plain decoding
        int nodes = 0;
        double tokens = 0.0, speed = 0.0;
        Why why = Why::Dear;  // there are no more
    };

    static size_t doublings(int n) {
        size_t found = 0;
        while (n > 1 && found < 7) n = (n + 1) / 2, ++found;
        return found;
    }
    double rate() const { return advantage_ * static_cast<double>(count_); }  // tokens that a plain step's time must bring
    double more(int nodes) const { return costs_.more(fixed_ + nodes) - costs_.more(fixed_); }
    double least(int nodes) const { return costs_.least(fixed_ + nodes) - costs_.least(fixed_); }
    double asking(bool own = false) const;  // of all rows, or of those whose size was chosen here
    bool fits(int nodes, double asking) const { return 1.0 + costs_.most(fixed_ + nodes) + asking <= longest_; }
    bool may_try(double cost, int64_t last) const;
    Choice choose(const std::vector<Free>& free, double asking, bool hopeful = false) const;
    void because(Step& step, Why why, const Choice& best, double asking) const;
    double patience() const;
    int bearable(const std::vector<Free>& free, int nodes, double asking) const;
    bool plan_whole(Step& step);
    void plan_levels(const std::vector<size_t>& beside);
    double chance(const Step& step, Word& word) const;
    int hear(Step& step, const Draft& draft, size_t n, int source, const std::vector<int>& places);
    void look(Step& step, const Draft& draft);
    void count(Step& step, const std::vector<int32_t>& path, const std::vector<int32_t>& tokens);
    void count_levels(Step& step, const std::vector<bool>& good);
    static bool added(const Step& step, int path);
    void settle(const Of& paths);
    static double sees(double start, double end);
    void read();
    void time_drafting(const Seconds& seconds);

    StepCosts costs_;
    double stretch_;
    Chances chances_;
    std::map<int64_t, Row> rows_;
    std::map<std::pair<int, int>, Whole> wholes_;
    std::map<int, Asking> asking_;                             // by drafter
    double budget_ = 0.5;                                      // plain steps that drafts may lose
    double advantage_ = 1.0, tokens_ = 48.0, plains_ = 48.0;   // the rate over plain decoding's; decayed sums behind it
    double answers_ = 256.0;  // tokens of an answer, on average
    int ended_ = 2;           // answers that say so
    double work_ = 0.0;       // plain steps of the step under way, drafts aside, prompts included
    double reading_ = 0.0;    // plain steps that reading for drafts may lose
    int64_t step_ = 0, drafted_at_ = 0, tried_at_ = 0,
            levels_at_ = 0;  // when nodes were last verified, and as a try, and a network was asked
    int tries_ = 0;                                            // made while the budget was spent
    int fruitless_ = 0;                                        // drafts, one after the other, that brought nothing

    // the step that is under way
    std::vector<Step> steps_;
    size_t count_ = 0;
    double longest_ = 0.0;         // plain steps that it may take
    int fixed_ = 0, verified_ = 0; // nodes that were not chosen here; all
    std::vector<Free> free_;
};

}  // namespace outpace
