// The policy behind `--size auto`: how much each row drafts in a step. docs/policy.md says why; control/adaptive.py calls it.
//
// Costs are in plain steps of the batch at hand, gains in tokens. What drafting has really brought and taken is kept in
// accounts; what is in the red drafts nothing, whatever is expected of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "drafting/chances.h"
#include "drafting/pace.h"

namespace outpace {

class Policy {
public:
    struct Kind {  // of a row: what stays as it is for its whole life
        int64_t request;
        int sampling;    // requests whose acceptance may be pooled
        bool rejection;  // what was sampled may not be dropped
        int drafter;
        int levels;  // the source that takes a forward for every level; -1: none
        bool nodes, trims;  // as in Python's DraftCost
    };
    struct View {  // a row in a step
        int64_t row;
        bool adaptive;
        int most;  // nodes
        double context;
    };
    enum class Why : uint8_t { Fixed, NoRoom, Waits, Nothing, Drafts, Try, Dear, Others, Lost, Plain, Levels, Long };
    struct Said {  // of a row, in a step
        int size = 0;
        Why why = Why::NoRoom;
        double expected = 0.0;  // speed over plain decoding of the best draft; 0: there was none
        double price = 0.0, brings = 0.0;  // tokens that its first node costs, and that its best one brings
    };
    struct Proposal {  // drafts [rows, width]; pointers may be null, as their arrays may be None in Python
        const int32_t* widths;
        const int32_t* parents;
        const float* said;  // NaN: unknown
        const uint8_t* source;
        size_t width;
        const int* sources;  // what source numbers stand for; null: themselves
        bool drawn;          // nodes carry q
        const int32_t* levels = nullptr;  // drafting forwards that rows had; null: as many as they were allowed
    };
    struct Seconds {
        double draft, body;
    };

    // `stretch`: the longest that a step with drafts may be, in plain steps of its rows, where it holds up several rows.
    explicit Policy(CostTable cost, double stretch);

    bool knows(int64_t row, int64_t request) const;
    void admit(int64_t row, const Kind& kind);

    // Rows that it knows. Afterwards `nodes` and `levels` say what to ask for.
    void plan(const std::vector<View>& views, int64_t prefill);
    int nodes(size_t i) const { return steps_[i].nodes; }
    int levels(size_t i) const { return steps_[i].levels; }

    // Afterwards `kept` are the nodes to verify, ascending and with their parents. `all`: look even where it cannot pay.
    void trim(const Proposal& drafts, bool all);
    const std::vector<int>& kept(size_t i) const { return steps_[i].kept; }
    const Said& said(size_t i) const { return steps_[i].said; }
    const std::vector<double>& gains(size_t i) const { return steps_[i].gains; }

    // `accepted` [rows]; `path` [rows, depth]: nodes of what was kept.
    void learn(const int32_t* accepted, const int32_t* path, size_t depth, const Seconds& seconds);
    void release(int64_t row);

    size_t planned() const { return count_; }
    size_t rows() const { return rows_.size(); }
    size_t tables() const { return chances_.size(); }
    double capital() const { return capital_; }
    double advantage() const { return advantage_; }
    const Pace& pace() const { return pace_; }

private:
    static constexpr double kSure = 4.0;  // times its cost that a node is expected to bring, for a try without credit

    struct Row {
        Kind kind;
        std::array<double, 2> biases{0.0, 0.0}, odds{1.0, 1.0};  // in log-odds, of first nodes and deeper ones; exp(-bias)
        int64_t proposals = 0;
        int fruitless = 0, wait = 0, waited = 4, reach = 64;
        size_t crowd = 0;            // rows of the step in which it began to wait
        double value = 0.0;          // plain steps that a proposal saves, lately
        double lead = 0.0;           // steps that it is ahead of plain decoding: its tokens, less what all drafts took
        double wall = 0.0;           // steps that it was in
        // Steps that its own drafts saved the batch: whatever cost next to nothing to ask for, and a network's levels.
        double balance = 0.0, network = 0.0;
        double wholes = 0.0, gained = 0.0, verified = 0.0;  // drafts that are verified whole: decayed sums
        bool drawn = false;          // its nodes are sampled, and may not be dropped
    };
    struct Whole {  // such drafts of one drafter and kind of sampling
        double drafts = 0.0, gained = 0.0, nodes = 0.0;
    };
    struct Asking {  // what a drafter takes, in seconds
        double each = 0.0;  // a row
        double value = 1.0; // plain steps that a row's asking saves, lately
        std::array<double, 8> level{};  // a level, by doublings of the rows
        int rows = 0, levels = 0;  // in this step
        bool known() const;
    };
    struct Step {  // a row's part of the step that is under way
        View view;
        Row* row;  // null: released
        Kind kind;
        int nodes, levels;
        bool there, trims;  // whether there is a draft, and it may be trimmed
        std::vector<int> parents, depths, sources, kept;
        std::vector<double> gains, chances;
        std::vector<Chance*> learns;
        bool asks = false;  // its network was asked as a try, so that its nodes need no account
        bool waits = false;  // it asks nobody but a network
        Said said;
    };
    struct Free {  // a node to choose
        double negative;  // gain
        int row, node;
        bool operator<(const Free& o) const {
            return negative != o.negative ? negative < o.negative : row != o.row ? row < o.row : node < o.node;
        }
    };

    bool adaptive(const Step& step) const { return step.view.adaptive; }
    bool whole(const Step& step) const { return !step.kind.trims || (step.row && step.row->drawn); }
    double more(int nodes) const { return share_ * (pace_.more(fixed_ + nodes) - pace_.more(fixed_)); }
    double doubt(int nodes) const { return share_ * pace_.doubt(fixed_ + nodes); }
    // Whether so many nodes, and so many plain steps of drafting, leave the step as short as it has to be, even if they
    // take a deviation more than is thought; of a single node that is not asked, or nothing would be learned.
    bool fits(int nodes, double drafting) const {
        const double doubted = nodes > 1 ? pace_.doubt(fixed_ + nodes) : 0.0;
        return share_ * (pace_.more(fixed_ + nodes) + doubted) + drafting <= room_;
    }
    bool is_network(const Step& step, size_t node) const { return step.kind.levels >= 0 && step.sources[node] == step.kind.levels; }
    bool too_risky(int nodes, double tokens, double capital) const;
    double rate() const { return advantage_ * static_cast<double>(count_); }  // tokens that a plain step's time must bring
    double slack(const Row& row) const;
    bool trusted(const Row& row, double balance) const;
    bool trusted(const Row& row) const { return trusted(row, row.balance); }
    // Whether a row's network may draft: neither all rows' nor its own drafts have lost what they may.
    bool may_ask(const Row& row) const { return network_ >= 0.0 && trusted(row, row.network); }
    double most_capital() const;
    bool may_try(double loss, int nodes, double tokens, bool network = false);
    bool bears(double loss) const;
    bool fair(const Step& step, double gain, double loss) const;
    bool plan_whole(Step& step);
    void plan_levels(int drafter);
    static int doublings(int n);
    double drafting() const { return asking() + forwards(); }
    double asking() const;
    double forwards() const;
    double level_seconds(const Asking& asking, int rows) const;
    void count_levels(const int32_t* levels);
    void look(Step& step, const Proposal& drafts, size_t i, double floor, bool all);
    int worth(double& saved);
    int bearable(int count) const;
    void ask_again(Step& step, double saved);
    void count(Step& step, const int32_t* path, int accepted);
    void account(const int32_t* accepted, const int32_t* path, size_t depth);
    void time_drafting(double seconds);

    Pace pace_;
    double stretch_;
    Chances chances_;
    std::map<int64_t, Row> rows_;
    std::map<std::pair<int, int>, Whole> wholes_;
    std::vector<Asking> asking_;  // by drafter
    double observing_ = 0.0;      // seconds of the draft phase where nothing is asked
    int64_t observed_ = 0;
    double capital_, try_credit_;       // of what costs next to nothing to ask for
    double network_, network_credit_;   // the same of networks, which take a forward for every level
    int rests_ = 0, patience_;          // steps without a try of those; how many after the next that brings nothing
    int blocked_ = 0;  // steps that all wait
    double advantage_ = 1.0, tokens_, plains_;  // the long-run rate over plain decoding's; decayed sums behind it

    // the step that is under way
    std::vector<Step> steps_;
    size_t count_ = 0;
    int64_t prefill_ = 0;
    double unit_ = 1.0, share_ = 1.0;  // a plain step's seconds; what of it is the forward and the engine
    double room_ = 0.0;                  // plain steps that drafts may add to it, beside prompts
    double held_ = 0.0;                  // of those, what `plan` has given away; and nodes of drafts that are verified whole
    int wholes_planned_ = 0;
    double asked_ = 0.0, levels_ = 0.0;  // plain steps that asking was expected to take; of them, a network's levels
    bool network_try_ = false;           // what is tried is a network
    int fixed_ = 0, verified_ = 0;     // nodes that were not chosen here; all
    int tried_ = 0, instead_ = 0;      // nodes that are verified as a try, and that were thought best
    double hoped_ = 0.0;               // tokens that the difference was expected to bring
    bool first_ = false, red_ = false;  // some row drafts for the first time; only tries are left
    std::vector<Free> free_;
};

}  // namespace outpace
