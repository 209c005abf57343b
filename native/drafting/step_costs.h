// What drafted nodes add to a step, in plain steps of the same rows.
//
// Evidence is the ratio of two steps, one right after the other, of which one had drafts. What disturbs a machine slows
// either as often, so the median of such ratios is right though half of all steps are disturbed; no single time decides.
// The measured cost table (control/cost.py) gives the shape between and beyond what was measured.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

namespace outpace {

struct CostTable {                           // seconds of a forward
    std::vector<double> table;               // by new tokens, from 0
    double last_width, last_seconds, slope;  // beyond it
    double row, position, position_width;
    // Of a mixture: experts a layer, those of a token, seconds of one more in every layer, how many the table's forwards read.
    double experts = 0.0, used = 0.0, expert = 0.0;
    std::vector<double> read = {};

    bool mixes() const { return expert > 0.0 && used > 0.0 && used < experts; }
    double width(int64_t n) const {
        if (n < static_cast<int64_t>(table.size())) return table[static_cast<size_t>(n)];
        return last_seconds + slope * (static_cast<double>(n) - last_width);
    }
};

class Ratios {  // the last 32 values of something that is disturbed now and then
public:
    static constexpr int kEnough = 4;  // values that count as measured

    void add(double value);
    int count() const { return count_; }
    bool measured() const { return count_ >= kEnough; }
    double median() const { return middle_; }
    double low() const { return low_; }
    double high() const { return high_; }
    void forget(int most);  // all but so many

private:
    std::array<float, 32> values_{};
    int count_ = 0, next_ = 0;
    double middle_ = 0.0, low_ = 0.0, high_ = 0.0;  // the median, and what it lies between all but surely
};

class StepCosts {
public:
    static constexpr int kSizes = 8;  // 1, 2, 4, ... 128 nodes

    struct Curve {  // of so many rows
        double alike = 1.0;  // new tokens choose as many experts as this share of them would that chose independently
        int alikes = 0;      // steps that say so
        std::array<Ratios, kSizes> ratios;  // log of measured over what the table says, by size
        std::array<double, kSizes> more{}, least{}, most{};  // plain steps that so many nodes add, and that they may add
        int64_t steps = 0;
        double plain = 0.0;  // seconds of a step without drafts, lately
    };

    explicit StepCosts(CostTable table);

    // The batch of the step that begins: `cached` positions in all its rows, `prefill` tokens of prompts beside them.
    void turn(int rows, double cached, int64_t prefill);
    double more(int nodes) const { return line(now_->more, prefill_ + nodes) - prompts_; }  // plain steps that so many nodes add
    double least(int nodes) const { return line(now_->least, prefill_ + nodes) - line(now_->least, prefill_); }  // that they may add
    double most(int nodes) const { return line(now_->most, prefill_ + nodes); }  // that they and the prompts may add
    double seen(int nodes) const;  // what the ratios of about so many nodes say alone, however few they are; 0: there are none
    double prompts() const { return prompts_; }                                 // and that the prompts add
    double table(int nodes) const;                                              // `more` without prompts, as the table says
    double among_many() const { return table_.width(64) / 64.0 / table_.width(1); }  // a token of a prompt, beside one alone
    bool measured(int nodes) const;  // whether that is known of about so many
    // Most nodes that may be verified: what was measured, and if they may `grow` twice that.
    int reach(bool grow) const { return std::max({4, rows_, grow ? 2 * seen_ : seen_}); }
    double since_plain() const { return static_cast<double>(step_ - plain_at_); }  // steps
    double compared() const;  // ratios of the last step's size
    bool wants_plain(double advantage) const;                       // whether this step had better have no drafts, to measure
    // Of the step, drafting aside. `experts`: that it read a layer, of a mixture; 0: not known.
    void learn(int nodes, double seconds, double experts);
    // Experts a layer that a step with so many nodes is expected to read, of all; 0: there is no mixture whose price is known.
    double reads(int nodes) const { return table_.mixes() ? read(rows_ + nodes) : 0.0; }
    double experts() const { return table_.experts; }
    int rows() const { return rows_; }
    const std::map<int, Curve>& curves() const { return curves_; }

private:
    static constexpr double kQuiet = 0.05;  // what neighbouring steps are thought to be apart, in logs, until it is known

    void draw(Curve& curve);
    double read(int64_t tokens) const;
    double seconds(int64_t tokens) const;
    double alike(double read, int tokens) const;
    double error(const Ratios& ratios) const;  // the standard error of their median
    bool contradicts(const Curve& curve, int k) const;
    double corrected(double guess, const Ratios& ratios) const;
    static double line(const std::array<double, kSizes>& more, int64_t nodes);

    CostTable table_;
    double alike_ = 1.0;  // of the table's tokens
    Ratios noise_;  // how far neighbouring steps are apart, in logs, of which both have drafts or neither
    std::map<int, Curve> curves_;  // by rows; above 8 by powers of 2
    Curve* now_ = nullptr;
    int rows_ = 0, known_ = 0, seen_ = 0;  // the most nodes that were measured, and of which nothing contradicts what is believed
    int64_t prefill_ = 0, step_ = 0, plain_at_ = 0;
    double context_ = 0.0, plain_ = 0.0, prompts_ = 0.0;  // cached positions a row; the table's seconds of a plain step
    struct {
        int64_t step = -1;
        int rows, nodes;
        double seconds;
    } last_;
};

}  // namespace outpace
