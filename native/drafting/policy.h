// The policy behind `--size auto` for drafters that look tokens up: how much each row drafts in a step. The reference is
// control/adaptive.py with calibration.py, timing.py and rows.py, decision for decision; what each number is for stands there.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace outpace {

// The modules' constants.
struct PolicyRules {
    std::vector<double> edges;  // calibration
    int levels, fade_every;
    double unknown, strength, memory, fade, rate, limit;
    int window, furthest;  // timing
    double fading, alone, together;
    double explore, harm, allowance, forgiven;  // rows
    int first_tries, patience, longest_wait;
    int least_reach, sampled, fresh;  // adaptive
    double horizon;
};

// control/cost.py: seconds of a forward.
struct PolicyCost {
    std::vector<double> table;               // by new tokens, from 0
    double last_width, last_seconds, slope;  // beyond it
    double row, position, position_width;

    double width(int64_t n) const {
        if (n < static_cast<int64_t>(table.size())) return table[static_cast<size_t>(n)];
        return last_seconds + slope * (static_cast<double>(n) - last_width);
    }
};

class Policy {
public:
    struct View {  // a row of the batch
        int row, kind;
        bool adaptive;
    };
    struct Proposal {  // drafts [rows, width]; pointers may be null, as their arrays may be None in Python
        const int32_t* widths;
        const int32_t* parents;
        const float* said;
        const uint8_t* source;
        size_t width;
        const std::vector<int>* sources;  // what source numbers stand for
        const std::vector<bool>* sampled;  // by row: whether its nodes may not be dropped
    };
    struct Choice {
        std::vector<std::vector<int>> kept;  // nodes to verify, by row
        std::optional<double> expected;      // speed over plain decoding of the best draft
        std::vector<bool> chosen;            // by row: whether that was up to the policy
    };
    struct Seconds {
        double total, draft, target, rest;
    };

    Policy(PolicyRules rules, PolicyCost cost);

    // Nodes to ask for, by row; none at all while all rows wait: then there is nothing to trim or to learn, and `waited`
    // ends the step.
    std::vector<int> plan(std::vector<View> rows, std::vector<int> most, std::vector<int64_t> contexts, int64_t prefill);
    Choice trim(const Proposal& drafts);
    // `accepted` [rows]; `path` [rows, depth]: nodes of what `trim` kept.
    void learn(const std::vector<int>& accepted, const int32_t* path, size_t depth, const Seconds& seconds);
    void waited(double seconds);
    void release(int row);
    size_t rows() const { return rows_.size(); }  // that it knows
    size_t planned() const { return views_.size(); }

private:
    struct Bucket {
        double accepted = 0.0, tried = 0.0;
    };
    struct Table {
        std::array<std::vector<Bucket>, 2> said;
        std::vector<Bucket> unsaid;
    };
    struct Median {
        std::vector<double> samples;  // a ring
        size_t next = 0;
        double value = 0.0;
    };
    struct Row {
        int kind;
        std::array<double, 2> biases{0.0, 0.0}, odds{1.0, 1.0};
        int64_t proposals = 0, fruitless = 0;
        int wait = 0, waited = 4, reach = 64;
        double value = 0.0, lead = 0.0, balance = 0.0;
        int64_t tries = 0;
        double spent = 0.0, seconds = 0.0, wall = 0.0;
    };
    struct Look {
        bool there = false, trims = false, chain = true;
        std::vector<int> parents;
        std::vector<double> gains, chances;
        std::vector<Bucket*> buckets;
        std::vector<int> kept;
    };
    struct Free {
        double negative;  // gain
        int row, node;
        bool operator<(const Free& o) const {
            return negative != o.negative ? negative < o.negative : row != o.row ? row < o.row : node < o.node;
        }
    };

    void tick();
    Table& table(int source, int kind);
    double chance(const Bucket& bucket, double said) const;
    void add(Median& median, double sample) const;
    double plain_seconds(const std::vector<int64_t>& contexts, int64_t prefill) const;
    double drafting(int forwards) const;
    double more(int64_t width, int64_t nodes, int64_t context) const;
    double cheapest(int64_t width);
    double forward(const std::vector<int64_t>& contexts) const;
    bool timed();
    double rate() const;
    double slack(const Row& row) const { return row.lead + rules_.harm * row.wall; }
    bool trusted(const Row& row) const;
    bool may_try(Row& row, double loss);
    void ask_again(Row& row, double saved);
    void look(Look& look, Row& row, bool adaptive, const Proposal& drafts, size_t i, double floor);
    std::pair<int, double> worth(const std::vector<Free>& free, int64_t width, bool drafted, std::optional<double>& expected);
    int bearable(const std::vector<Free>& nodes, int count, int64_t width);
    void settle(int64_t width, double saved);
    void count(Row& row, const Look& look, const int32_t* path, int accepted) const;
    void time(const Seconds& seconds, bool drafted);
    void average(double tokens, double plain_steps);

    PolicyRules rules_;
    PolicyCost cost_;
    std::map<std::pair<int, int>, Table> tables_;  // source, kind; buckets never move
    std::map<int, Row> rows_;
    int64_t ticks_ = 0, steps_ = 0;
    double advantage_ = 1.0, tokens_, plain_tokens_;
    // timing
    std::map<int, Median> drafting_;
    std::array<Median, 2> overhead_, slowness_;
    std::map<int64_t, double> cheapest_;
    double bare_ = 0.0, beyond_ = 0.0, scale_ = 1.0, surcharge_ = 0.0;
    // the step that is under way
    std::vector<View> views_;
    std::vector<Row*> known_;
    std::vector<int> sizes_;
    std::vector<int64_t> contexts_;
    int64_t prefill_ = 0;
    bool first_ = false, any_ = false;
    int asked_ = 0, verified_ = 0;
    double plain_ = 0.0, forward_ = 0.0, extra_ = 0.0;
    std::vector<Look> looks_;
};

}  // namespace outpace
