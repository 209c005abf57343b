// What a step takes here and now: learned from the wall time of this process's own steps, for every number of rows and
// drafted nodes. The measured cost table is where it begins, no more.
//
// A batch of B rows with n drafted nodes is modelled as
//
//     seconds = table(B, contexts) * exp(speed) * (1 + more(n)),    more(n) on a line between knots
//
// `speed` wanders quickly (the machine, its neighbours), `more` slowly. Both are the state of a small Kalman filter on
// log(seconds), one for each number of rows and class of context (a curve); the table says its first mean, and a prior
// that allows for a table that is wrong by several times, as a whole or in places. A single step far off is a stall and
// teaches nothing; after a drafted one a plain step is asked for, to tell a slower machine from a dearer width.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace outpace {

// control/cost.py: seconds of a forward.
struct CostTable {
    std::vector<double> table;               // by new tokens, from 0
    double last_width, last_seconds, slope;  // beyond it
    double row, position, position_width;

    double width(int64_t n) const {
        if (n < static_cast<int64_t>(table.size())) return table[static_cast<size_t>(n)];
        return last_seconds + slope * (static_cast<double>(n) - last_width);
    }
};

class Pace {
public:
    static constexpr int kKnots = 14;  // 1, 2, 3, 4, 6, ... 128 nodes

    struct Learnt {  // a curve, for people
        int rows;
        double context;
        int64_t steps;
        double plain;                                      // seconds
        std::vector<std::array<double, 3>> more;           // nodes, plain steps that they add, standard deviation
    };

    explicit Pace(CostTable cost) : cost_(std::move(cost)) {}

    // The batch of the step that begins: `cached` positions in all its rows, `prefill` tokens of prompts beside them.
    void turn(int rows, double cached, int64_t prefill);
    double plain() const { return plain_; }  // seconds of a step without drafts (and without prompts)
    double more(int nodes) const { return line(mean_, nodes); }    // plain steps that so many nodes add
    double doubt(int nodes) const { return line(sd_, nodes); }     // its standard deviation
    double worst(int nodes) const;  // that so many might add, beyond `more`, as far as that is known
    double prompts() const { return prompts_; }  // plain steps that the prompts beside it add
    double cheapest(int from) const;  // that a node beyond `from` adds, at the number of nodes where it adds least
    bool wants_plain(double advantage) const;  // whether this step had better draft nothing, to know what that takes
    void learn(int nodes, double seconds);     // of the step, drafting aside
    std::vector<Learnt> learnt() const;
    size_t curves() const { return curves_.size(); }

private:
    static constexpr int kMost = 1 + kKnots, kCurves = 48;
    struct Curve {
        int key, rows, context, knots;
        int64_t steps = 0, plains = 0, since = 0, used = 0;  // since: steps without plain evidence
        double noise, drift;                                  // variance of log(seconds); drift_ when last used
        int strange[2] = {0, 0};                              // steps far off, one after the other: plain, drafted
        bool doubted = false, inherited = false;
        double plain = 0.0;
        std::array<double, kMost> mean{};                     // speed, then more(knot)
        std::array<double, kKnots> prior{};                   // more(knot) that the table gives, floored: the prior's scale
        std::array<double, kMost * kMost> cov{};
    };

    struct Update {
        std::array<double, kMost> mean{}, gain{};            // afterwards; P h
        double first = 0.0, variance = 0.0, total = 0.0;     // how far off it was, and the variance of that; the last round's
        double more = 0.0;                                   // as was thought
    };

    Update look(const Curve& c, const std::array<double, kMost>& at, double seen) const;
    Curve& curve(int rows, int context, double mean_context);
    void spread(Curve& c, double share) const;  // adds a share of the prior's covariance
    double prior(const Curve& c, int j, int k) const;
    void refresh();
    double line(const std::array<double, kKnots + 1>& values, int nodes) const;

    CostTable cost_;
    std::vector<std::unique_ptr<Curve>> curves_;
    Curve* now_ = nullptr;
    int64_t clock_ = 0, prefill_ = 0;
    double drift_ = 0.0;  // sum of all that `speed` moved
    int rows_ = 0;
    double base_ = 0.0, plain_ = 0.0;
    double token_ = 0.0;  // seconds a token in steps with prompts; 0: none was seen yet
    std::array<double, kKnots + 1> mean_{}, sd_{};  // of `more`, never falling; index 0: no nodes
    int knots_ = 0;
    double prompts_ = 0.0;
    bool linear_ = false;  // the step has prompts in it: every node costs the same
};

}  // namespace outpace
