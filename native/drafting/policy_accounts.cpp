// The policy's accounts: rows, what they may lose, and what a step has brought and taken.
#include "drafting/policy.h"

#include <cmath>
#include <stdexcept>
#include <utility>

namespace outpace {
namespace {

constexpr double kCapital = 1.0;       // plain steps that drafting may lose a process before it has brought any,
constexpr double kDrip = 0.004;        // and for each step that passes
constexpr double kMostCapital = 3.0;   // what it may have brought that it may lose again, and 4 times the advantage
constexpr double kDebt = 3.0;          // most plain steps that the account may be in the red
constexpr double kTries = 0.003;       // plain steps a step that tries may be expected to lose
constexpr double kMostTries = 0.4, kFirstTries = 0.3;
constexpr double kDoubted = 1.5;       // deviations that a try's costs may be less than they are thought
constexpr double kMostLoss = 2.5;      // plain steps beyond the capital that a try may be thought to lose
constexpr double kRowMay = 1.0, kRowDrip = 0.004;      // what a row's own drafts may lose: plain steps, and for each step
constexpr double kOthersMay = 0.3, kOthersDrip = 0.006;  // what a row may lose to what others draft
constexpr double kRisk = 0.3, kStake = 1.0;  // plain steps of doubt that a step may hold, and of the capital
constexpr int kFirstRest = 16, kLongestRest = 512;  // steps between tries of a network that brings nothing: at first, in the end
constexpr int kPatience = 12;          // fruitless proposals before a row stops asking; then it waits 8, 16, ... steps
constexpr int kLeastPatience = 3;      // where other rows' proposals do not pay for their asking either
constexpr int kLongestWait = 64;
constexpr int kBlocked = 2;            // steps that all rows wait when one could not bear their drafts
constexpr double kHorizon = 48.0;      // steps over which the long-run rate is averaged
constexpr double kRate = 0.15, kLimit = 3.0;  // of a row's bias, in log-odds a trial

// Towards a sample; one that is far above counts as three times what is known.
void follow(double& value, double sample) { value += 0.15 * (std::min(sample, 3.0 * value) - value); }

}  // namespace

Policy::Policy(CostTable cost, double stretch)
    : pace_(std::move(cost)),
      stretch_(stretch),
      capital_(kCapital),
      try_credit_(kFirstTries),
      network_(kCapital),
      network_credit_(kFirstTries),
      patience_(kFirstRest),
      tokens_(kHorizon),
      plains_(kHorizon) {}

// -- rows -------------------------------------------------------------------------------------------------------------

bool Policy::knows(int64_t row, int64_t request) const {
    const auto found = rows_.find(row);
    return found != rows_.end() && found->second.kind.request == request;
}

void Policy::admit(int64_t row, const Kind& kind) {
    release(row);
    if (static_cast<size_t>(kind.drafter) >= asking_.size()) asking_.resize(static_cast<size_t>(kind.drafter) + 1);
    rows_[row].kind = kind;
}

void Policy::release(int64_t row) {
    for (size_t i = 0; i < count_; ++i)
        if (steps_[i].view.row == row) steps_[i].row = nullptr;
    rows_.erase(row);
}

double Policy::slack(const Row& row) const { return row.lead + kOthersMay + kOthersDrip * row.wall; }

bool Policy::trusted(const Row& row, double balance) const {
    return balance * std::sqrt(static_cast<double>(count_)) > -kRowMay * advantage_ - kRowDrip * row.wall;
}

// When a row asks next: every step while that pays, ever more rarely while it does not. Where a network was asked, what was
// saved says nothing of those beside it.
void Policy::ask_again(Step& step, double saved) {
    if (!step.row || !adaptive(step) || !step.nodes || (step.kind.levels >= 0 && step.levels) || whole(step)) return;
    Row& row = *step.row;
    Asking& asking = asking_[static_cast<size_t>(step.kind.drafter)];
    if (step.said.why == Why::Others) {  // it is not this row's fault, so all wait together, to draft together
        blocked_ = kBlocked;
        return;
    }
    row.value += (saved - row.value) / 16;
    asking.value += (saved - asking.value) / 64;
    const bool sure = step.there && !step.gains.empty() && step.gains[0] >= kSure * rate() * (more(1) + asked_);
    if (saved > 0 || (sure && (red_ || !trusted(row)))) {  // or something else keeps a good draft back
        row.fruitless = 0;
        row.waited = 4;
        return;
    }
    const double each = asking.each / unit_;
    if (++row.fruitless < (asking.value < each ? kLeastPatience : kPatience) || row.value >= each) return;
    row.wait = row.waited = std::min(2 * row.waited, kLongestWait);
    row.crowd = count_;
}

// What drafting has brought that it may lose again: the more it brings, the more its luck varies.
double Policy::most_capital() const { return kMostCapital + 4.0 * (advantage_ - 1.0); }

// Whether to verify what is thought to lose so many plain steps, to learn whether it does. What it really lost, as far as
// that is known afterwards, is what it is charged with: see `learn`.
bool Policy::may_try(double loss, int nodes, double tokens, bool network) {
    const double credit = network ? network_credit_ : try_credit_;
    const double gain = tokens / static_cast<double>(count_);
    if (credit <= 0.0 && (nodes > 1 || gain < kSure * advantage_ * (loss + gain))) return false;
    if (nodes > 1) {  // one node is tried whatever is thought of it: it may have met a stall
        const double least = std::max(loss - kDoubted * doubt(nodes), 0.0);
        const double most = std::min(loss, share_ * pace_.worst(fixed_ + nodes));
        if (least > credit || most > kMostLoss + std::max(capital_, 0.0)) return false;
    }
    tried_ = nodes;
    network_try_ = network;
    hoped_ = tokens;
    return true;
}

// Whether no row would have lost more than it may to others if it lost so many plain steps now.
bool Policy::bears(double loss) const {
    if (count_ == 1) return true;
    for (size_t i = 0; i < count_; ++i)
        if (!fair(steps_[i], 0.0, loss)) return false;
    return true;
}

// Whether a row may be in a step that is expected to bring it `gain` tokens and to lose it `loss` plain steps: it gains by
// it, or has not lost more than it may to others. Rows that opted out are not asked: the batch as a whole must gain.
bool Policy::fair(const Step& step, double gain, double loss) const {
    if (!adaptive(step) || !step.row || (gain >= loss && trusted(*step.row))) return true;
    return slack(*step.row) + gain >= loss;
}

// Whether so many nodes might cost more than they may: what they add is not known well enough. Once drafting has earned
// something, the tokens that are expected of them stand against that.
bool Policy::too_risky(int nodes, double tokens, double capital) const {
    const double earned = std::min(std::max((capital - kCapital) / (kMostCapital - kCapital), 0.0), 1.0);
    return share_ * (pace_.worst(fixed_ + nodes)) > kRisk + kStake * std::max(capital, 0.0) + earned * tokens / static_cast<double>(count_);
}

int Policy::doublings(int n) {
    int found = 0;
    while (n > 1 && found < 7) n = (n + 1) / 2, ++found;
    return found;
}

bool Policy::Asking::known() const {
    for (const double seconds : level)
        if (seconds > 0) return true;
    return false;
}

double Policy::level_seconds(const Asking& asking, int rows) const {
    const int at = doublings(rows);
    for (int apart = 0; apart < 8; ++apart)
        for (const int k : {at - apart, at + apart})
            if (k >= 0 && k < 8 && asking.level[static_cast<size_t>(k)] > 0) return asking.level[static_cast<size_t>(k)];
    return 0.0;
}

// Seconds that asking is expected to take in this step: of its own, and for the levels of networks.
double Policy::asking() const {
    double seconds = 0.0;
    for (const Asking& asking : asking_)
        if (asking.rows) seconds += asking.each * asking.rows;
    return seconds;
}

double Policy::forwards() const {
    double seconds = 0.0;
    for (const Asking& asking : asking_)
        if (asking.rows) seconds += asking.levels * level_seconds(asking, asking.rows);
    return seconds;
}

// What was allowed may not have been drafted: others were surer of a row.
void Policy::count_levels(const int32_t* levels) {
    for (Asking& asking : asking_) asking.levels = 0;
    for (size_t i = 0; i < count_; ++i) {
        if (!steps_[i].nodes || steps_[i].kind.levels < 0) continue;
        Asking& asking = asking_[static_cast<size_t>(steps_[i].kind.drafter)];
        asking.levels = std::max(asking.levels, levels[i] < 0 ? steps_[i].levels : levels[i]);
    }
    levels_ = forwards() / unit_;
    asked_ = asking() / unit_ + levels_;
}

// -- after the verdicts -----------------------------------------------------------------------------------------------

void Policy::learn(const int32_t* accepted, const int32_t* path, size_t depth, const Seconds& seconds) {
    for (size_t i = 0; i < count_; ++i)
        if (accepted[i] < 0 || static_cast<size_t>(accepted[i]) > depth || accepted[i] > static_cast<int>(steps_[i].kept.size()))
            throw std::invalid_argument("more was accepted than was verified");
    if (!count_) return;
    pace_.learn(verified_, seconds.body);
    time_drafting(seconds.draft);
    for (size_t i = 0; i < count_; ++i)
        if (steps_[i].there && !steps_[i].kept.empty()) count(steps_[i], path + i * depth, accepted[i]);
    if (tried_) {  // where nothing else was drafted, what it brought is known
        int brought = 0;
        for (size_t i = 0; i < count_; ++i) brought += adaptive(steps_[i]) ? accepted[i] : 0;
        const double gain = instead_ ? hoped_ / rate() : brought / static_cast<double>(count_);
        (network_try_ ? network_credit_ : try_credit_) -= more(tried_) - more(instead_) + (instead_ ? 0.0 : asked_) - gain;
        if (network_try_ && !instead_) {
            patience_ = brought ? kFirstRest : std::min(2 * patience_, kLongestRest);
            rests_ = brought ? 0 : patience_;
        }
    }
    account(accepted, path, depth);
    count_ = 0;  // a step is learned from once
}

// What networks draft has an account of its own: it is charged with their levels, and with what their nodes add to those of
// others, which would have been there without them.
void Policy::account(const int32_t* accepted, const int32_t* path, size_t depth) {
    const double rows = static_cast<double>(count_);
    int all = 0, gained = 0, drawn = 0, nodes = 0, askers = 0;  // by networks: accepted, verified; rows that asked one
    std::vector<int> own(count_, 0), size(count_, 0);           // the first two by row
    for (size_t i = 0; i < count_; ++i) {
        const Step& step = steps_[i];
        if (!adaptive(step) || step.kind.levels < 0 || !step.row) continue;
        askers += step.levels > 0;
        for (const int node : step.kept) size[i] += is_network(step, static_cast<size_t>(node));
        for (int n = 0; n < accepted[i]; ++n)
            own[i] += is_network(step, static_cast<size_t>(step.kept.at(static_cast<size_t>(path[i * depth + static_cast<size_t>(n)]))));
        nodes += size[i], drawn += own[i];
    }
    const int chosen = verified_ - fixed_;
    const double more = this->more(chosen), others = this->more(chosen - nodes), asked = asked_ - levels_;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        all += accepted[i];
        if (!adaptive(step)) continue;
        gained += accepted[i];
        if (!step.row) continue;
        Row& row = *step.row;
        row.wall += 1.0 + more + asked_;
        row.lead += accepted[i] - more - asked_;
        const int rest = static_cast<int>(step.kept.size()) - size[i];
        if (rest > 0) row.balance += (accepted[i] - own[i]) / rows - (others + asked) * rest / (chosen - nodes);
        if (nodes) row.network += own[i] / rows - (more - others) * size[i] / nodes;
        if (askers && step.levels > 0) row.network -= levels_ / askers;
    }
    const auto settle = [this](double& capital, double brought) {
        capital = std::min(std::max(capital + kDrip + brought, -kDebt), most_capital());
    };
    settle(capital_, (gained - drawn) / rows - others - asked);
    settle(network_, drawn / rows - (more - others) - levels_);
    try_credit_ = std::min(try_credit_ + kTries, kMostTries);
    network_credit_ = std::min(network_credit_ + kTries, kMostTries);
    if (prefill_) return;
    const double keep = 1.0 - 1.0 / kHorizon, tokens = 1.0 + all / rows;
    tokens_ = tokens_ * keep + tokens;
    plains_ = plains_ * keep + std::min(1.0 + share_ * pace_.more(verified_) + asked_, 4.0 + tokens);
    advantage_ = std::min(std::max(tokens_ / plains_, 1.0), 16.0);
}

// Every node that was tried: a child of the pending token or of an accepted node. `path`: nodes of what was kept.
void Policy::count(Step& step, const int32_t* path, int accepted) {
    const size_t seen = step.gains.size();
    std::vector<bool> good(seen, false), verified(seen, false);
    int last = -1;
    for (int n = 0; n < accepted; ++n) {
        last = step.kept.at(static_cast<size_t>(path[n]));
        good.at(static_cast<size_t>(last)) = true;
    }
    for (const int node : step.kept) {
        const size_t n = static_cast<size_t>(node);
        verified[n] = true;
        const int parent = step.parents[n];
        if (parent >= 0 && !good[static_cast<size_t>(parent)]) continue;
        step.learns[n]->learn(good[n]);
        if (!step.row) continue;
        double& bias = step.row->biases[parent >= 0];
        bias = std::max(-kLimit, std::min(kLimit, bias + kRate * (good[n] - step.chances[n])));
    }
    if (step.row)
        for (size_t deep = 0; deep < 2; ++deep) step.row->odds[deep] = std::exp(-step.row->biases[deep]);
    if (step.kind.levels >= 0) {  // how far the drafts of whoever pays by the level went
        Chances::Table& table = chances_.table(step.kind.levels, step.kind.sampling);
        double dropped = 0.0;
        bool tried = false, any = false;
        for (size_t n = 0; n < seen; ++n) {
            if (step.sources[n] != step.kind.levels) continue;
            if (good[n]) table.levels[static_cast<size_t>(std::min(step.depths[n], Chances::kLevels - 1))].learn(1.0);
            if (step.parents[n] != last) continue;
            any = true;
            if (verified[n])
                tried = true;
            else
                dropped += step.chances[n];
        }
        const size_t next = static_cast<size_t>(std::min(accepted, Chances::kLevels - 1));
        if (any) table.levels[next].learn(tried ? 0.0 : std::min(dropped, 1.0));
    }
    if (adaptive(step) && !step.trims) {
        Whole& known = wholes_[{step.kind.drafter, step.kind.sampling}];
        const double size = static_cast<double>(step.kept.size());
        known = {known.drafts * 0.98 + 1, known.gained * 0.98 + accepted, known.nodes * 0.98 + size};
        if (!step.row) return;
        Row& row = *step.row;
        row.wholes = row.wholes * 0.9 + 1;
        row.gained = row.gained * 0.9 + accepted;
        row.verified = row.verified * 0.9 + size;
    }
}

// Splits the draft phase among those that were asked, by what they were expected to take.
void Policy::time_drafting(double seconds) {
    if (prefill_ || first_ || !(seconds >= 0)) return;
    int asked = 0;
    for (const Asking& asking : asking_) asked += asking.rows > 0;
    if (!asked) {
        if (!observed_++)
            observing_ = seconds;
        else
            follow(observing_, seconds);
        return;
    }
    const double spent = std::max(seconds - observing_, 0.0), expected = drafting();
    for (Asking& asking : asking_) {
        if (!asking.rows) continue;
        double its = spent / asked;
        const double level = level_seconds(asking, asking.rows);
        if (asked > 1 && expected > 0) its = spent * (asking.each * asking.rows + asking.levels * level) / expected;
        if (asking.levels) {
            const double sample = std::max(its - asking.each * asking.rows, 0.0) / asking.levels;
            double& known = asking.level[static_cast<size_t>(doublings(asking.rows))];
            if (known > 0)
                follow(known, sample);
            else
                known = level > 0 ? std::min(sample, 3 * level) : sample;
        } else {
            const double sample = its / asking.rows;
            if (asking.each > 0)
                follow(asking.each, sample);
            else
                asking.each = sample;
        }
    }
}

}  // namespace outpace
