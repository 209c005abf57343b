// Long because it is one decision from plan to learn: split, its parts would be told apart by their state alone.
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
constexpr double kSure = 4.0;          // times its cost that a node is expected to bring, for a try without credit
constexpr double kDoubted = 1.5;       // deviations that a try's costs may be less than they are thought
constexpr double kMostLoss = 2.5;      // plain steps beyond the capital that a try may be thought to lose

constexpr double kRowMay = 1.0, kRowDrip = 0.004;      // what a row's own drafts may lose: plain steps, and for each step
constexpr double kOthersMay = 0.3, kOthersDrip = 0.006;  // what a row may lose to what others draft
constexpr double kRisk = 0.3, kStake = 1.0;  // plain steps of doubt that a step may hold, and of the capital
constexpr double kHorizon = 48.0;      // steps over which the long-run rate is averaged
constexpr double kRate = 0.15, kLimit = 3.0;  // of a row's bias, in log-odds a trial
constexpr int kLeastReach = 6;         // nodes that a row may always ask for
constexpr int kFirstLevels = 4;        // levels that are drafted until a level's time is known
constexpr int kPatience = 12;          // fruitless proposals before a row stops asking; then it waits 8, 16, ... steps
constexpr int kLongestWait = 64;
constexpr int kBlocked = 2;            // steps that all rows wait when one could not bear their drafts
constexpr double kWholeGain = 1.0, kWholeDrafts = 4.0;  // tokens that an unknown whole draft is hoped to bring; drafts that counts for

int doublings(int n) {
    int found = 0;
    while (n > 1 && found < 7) n = (n + 1) / 2, ++found;
    return found;
}

// Towards a sample; one that is far above counts as three times what is known.
void follow(double& value, double sample) { value += 0.15 * (std::min(sample, 3.0 * value) - value); }

}  // namespace

Policy::Policy(CostTable cost)
    : pace_(std::move(cost)), capital_(kCapital), try_credit_(kFirstTries), tokens_(kHorizon), plains_(kHorizon) {}

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
    if (!rows_.erase(row)) return;
    for (auto& [number, other] : rows_) other.wait = std::min(other.wait, 1);  // the batch is another one: it may pay now
}

double Policy::slack(const Row& row) const { return row.lead + kOthersMay + kOthersDrip * row.wall; }

bool Policy::trusted(const Row& row) const {
    return row.balance * std::sqrt(static_cast<double>(count_)) > -kRowMay * advantage_ - kRowDrip * row.wall;
}

// What drafting has brought that it may lose again: the more it brings, the more its luck varies.
double Policy::most_capital() const { return kMostCapital + 4.0 * (advantage_ - 1.0); }

// Whether to verify what is thought to lose so many plain steps, to learn whether it does. What it really lost, as far as
// that is known afterwards, is what it is charged with: see `learn`.
bool Policy::may_try(double loss, int nodes, double tokens) {
    const double gain = tokens / static_cast<double>(count_);
    if (try_credit_ <= 0.0 && (nodes > 1 || gain < kSure * advantage_ * (loss + gain))) return false;
    if (nodes > 1) {  // one node is tried whatever is thought of it: it may have met a stall
        const double least = std::max(loss - kDoubted * doubt(nodes), 0.0);
        const double most = std::min(loss, share_ * pace_.worst(fixed_ + nodes));
        if (least > try_credit_ || most > kMostLoss + std::max(capital_, 0.0)) return false;
    }
    tried_ = nodes;
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
bool Policy::too_risky(int nodes, double tokens) const {
    const double earned = std::min(std::max((capital_ - kCapital) / (kMostCapital - kCapital), 0.0), 1.0);
    return share_ * (pace_.worst(fixed_ + nodes)) > kRisk + kStake * std::max(capital_, 0.0) + earned * tokens / static_cast<double>(count_);
}

// -- before drafting --------------------------------------------------------------------------------------------------

void Policy::plan(const std::vector<View>& views, int64_t prefill) {
    chances_.tick();
    count_ = views.size();
    if (steps_.size() < count_) steps_.resize(count_);
    prefill_ = prefill;
    fixed_ = verified_ = tried_ = instead_ = 0;
    first_ = red_ = false;
    asked_ = 0.0;
    for (Asking& asking : asking_) asking.rows = asking.levels = 0;
    double cached = 0.0;
    bool fixed = false, any = false;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        step.view = views[i];
        step.row = &rows_.at(views[i].row);
        step.kind = step.row->kind;
        step.nodes = step.levels = views[i].adaptive ? 0 : views[i].most;
        step.there = false;
        step.kept.clear();
        step.gains.clear();
        step.said = {0, views[i].most ? Why::Fixed : Why::NoRoom, 0.0, 0.0, 0.0};
        cached += views[i].context;
        fixed = fixed || step.nodes;
        any = any || (views[i].adaptive && views[i].most);
    }
    if (!count_) return;
    pace_.turn(static_cast<int>(count_), cached, prefill);
    unit_ = std::max(pace_.plain() + observing_, 1e-12);
    share_ = pace_.plain() / unit_;
    const auto all = [this](Why why) {
        for (size_t i = 0; i < count_; ++i)
            if (adaptive(steps_[i]) && steps_[i].view.most) steps_[i].said.why = why;
    };
    if (any && !fixed && pace_.wants_plain(advantage_)) {
        all(Why::Plain);
    } else if (any && blocked_) {
        --blocked_;
        all(Why::Others);
    } else if (any) {
        red_ = capital_ < 0;
        for (size_t i = 0; i < count_; ++i) {
            Step& step = steps_[i];
            Row& row = *step.row;
            if (!adaptive(step) || !step.view.most) continue;
            if (row.wait) {
                --row.wait;
                step.said.why = Why::Waits;
            } else if (step.kind.levels >= 0) {
                step.nodes = step.view.most;  // plan_levels says how many
            } else if (whole(step)) {
                if (plan_whole(step)) step.nodes = step.levels = step.view.most;
            } else {
                step.nodes = step.levels = std::min(step.view.most, row.reach);
            }
        }
        for (int drafter = 0; drafter < static_cast<int>(asking_.size()); ++drafter) plan_levels(drafter);
    }
    for (size_t i = 0; i < count_; ++i) {
        const Step& step = steps_[i];
        if (!step.nodes) continue;
        Asking& asking = asking_[static_cast<size_t>(step.kind.drafter)];
        ++asking.rows;
        if (step.kind.levels >= 0) asking.levels = std::max(asking.levels, step.levels);
        first_ = first_ || !step.row->proposals;
    }
    asked_ = drafting() / unit_;
}

// Whether a draft that is verified whole or not at all is worth asking for, by what such drafts have brought.
bool Policy::plan_whole(Step& step) {
    const Row& row = *step.row;
    const Whole& known = wholes_[{step.kind.drafter, step.kind.sampling}];
    const double shared = (known.gained + kWholeDrafts * kWholeGain) / (known.drafts + kWholeDrafts);
    const double gain = (row.gained + kWholeDrafts * shared) / (row.wholes + kWholeDrafts);
    const double drafts = known.drafts + row.wholes;
    const double size = drafts > 0 ? (known.nodes + row.verified) / drafts : step.view.most;
    const int nodes = std::min(std::max(static_cast<int>(std::lround(size)), 1), step.view.most);
    const double loss = more(nodes) + asking_[static_cast<size_t>(step.kind.drafter)].each / unit_;
    step.said.price = loss * rate();
    step.said.brings = gain;
    step.said.expected = (1.0 + gain) / (1.0 + loss);
    const bool pays = !red_ && gain > rate() * loss && trusted(row) && !too_risky(nodes, gain);
    const double missing = loss - gain / static_cast<double>(count_);
    if (pays || (bears(loss) && may_try(missing, nodes, gain))) return true;
    step.said.why = trusted(row) ? Why::Dear : Why::Lost;
    return false;
}

// How many forwards a stepwise drafter is worth, for all of its rows together, by how far their drafts went before.
void Policy::plan_levels(int drafter) {
    Asking& asking = asking_[static_cast<size_t>(drafter)];
    int rows = 0, most = 0;
    for (size_t i = 0; i < count_; ++i) {
        const Step& step = steps_[i];
        if (step.kind.drafter == drafter && step.kind.levels >= 0 && adaptive(step) && step.nodes)
            ++rows, most = std::max(most, step.nodes);
    }
    if (!rows) return;
    const double level = level_seconds(asking, rows) / unit_;
    if (!asking.known()) most = std::min(most, kFirstLevels);
    std::vector<Free> nodes;
    std::vector<double> gains(count_, 1.0);
    std::vector<int> best(count_, 0);
    double top = 0.0, first = 0.0;
    int risky = 0;
    for (int l = 1; l <= most; ++l) {
        double passed = 0.0;
        for (size_t i = 0; i < count_; ++i) {
            Step& step = steps_[i];
            if (step.kind.drafter != drafter || step.kind.levels < 0 || !adaptive(step) || step.nodes < l) continue;
            Row& row = *step.row;
            const Chance& chance = chances_.table(step.kind.levels, step.kind.sampling).levels[static_cast<size_t>(std::min(l, Chances::kLevels) - 1)];
            const double its = chance.given(Chances::kUnknown);
            gains[i] *= its / (its + (1.0 - its) * row.odds[l > 1]);
            if (red_ || !trusted(row)) continue;
            passed += gains[i];
            nodes.push_back({-gains[i], static_cast<int>(i), l});
        }
        if (l == 1)
            for (size_t i = 0; i < count_; ++i) first = std::max(first, gains[i] < 1.0 ? gains[i] : 0.0);
        if (passed <= rate() * level) break;  // later levels pass less often
        std::sort(nodes.begin(), nodes.end());
        double tokens = 0.0, here = 0.0;
        int chosen = 0;
        for (int n = 1; n <= static_cast<int>(nodes.size()); ++n) {
            tokens -= nodes[static_cast<size_t>(n) - 1].negative;
            if (too_risky(n, tokens)) break;
            const double value = tokens - rate() * (more(n) + l * level);
            if (value > here) here = value, chosen = n;
        }
        if (here <= top) {
            if (++risky > 2) break;
            continue;
        }
        std::vector<int> depth(count_, 0);
        std::vector<double> after(count_, 0.0);
        for (int n = 0; n < chosen; ++n) {
            const Free& node = nodes[static_cast<size_t>(n)];
            ++depth[static_cast<size_t>(node.row)];
            after[static_cast<size_t>(node.row)] -= node.negative;
        }
        bool bearable = true;
        for (size_t i = 0; i < count_ && count_ > 1; ++i)
            bearable = bearable && fair(steps_[i], after[i], more(chosen) + l * level);
        if (bearable) top = here, best = std::move(depth);
    }
    if (top <= 0.0) {
        const double loss = level + more(1);
        if (bears(loss) && may_try(loss - first / static_cast<double>(count_), 1, first))
            for (size_t i = 0; i < count_; ++i)
                if (steps_[i].kind.drafter == drafter && adaptive(steps_[i]) && steps_[i].nodes && gains[i] < 1.0) {
                    best[i] = 1;
                    break;
                }
    }
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        if (step.kind.drafter != drafter || step.kind.levels < 0 || !adaptive(step) || !step.nodes) continue;
        step.levels = best[i];
        step.said.why = Why::Levels;
        if (!step.kind.nodes) step.nodes = best[i];
        else if (!best[i]) step.nodes = std::min(step.nodes, step.row->reach);
    }
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

// Seconds that asking is expected to take in this step.
double Policy::drafting() const {
    double seconds = 0.0;
    for (const Asking& asking : asking_)
        if (asking.rows) seconds += asking.each * asking.rows + asking.levels * level_seconds(asking, asking.rows);
    return seconds;
}

// -- after drafting ---------------------------------------------------------------------------------------------------

void Policy::trim(const Proposal& drafts, bool all) {
    bool any = false;
    for (size_t i = 0; i < count_; ++i) any = any || drafts.widths[i] > 0;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        step.kept.clear();
        step.gains.clear();
        step.there = drafts.widths[i] > 0;
        if (!step.there && step.nodes) step.said.why = Why::Nothing;
    }
    fixed_ = verified_ = 0;
    if (!any) {
        for (size_t i = 0; i < count_; ++i) ask_again(steps_[i], 0.0);
        return;
    }
    int wholes = 0;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        if (!step.there || !step.row) continue;
        if (drafts.drawn && step.kind.rejection) step.row->drawn = true;
        step.trims = adaptive(step) && !whole(step);
        if (!adaptive(step)) fixed_ += drafts.widths[i];
        else if (!step.trims) wholes += drafts.widths[i];
    }
    const int asked_for = fixed_;
    fixed_ += wholes;  // for the choice among the others
    const double floor = 0.5 * rate() * share_ * pace_.cheapest(fixed_);
    free_.clear();
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        if (!step.there || !step.row) continue;
        look(step, drafts, i, step.trims ? floor : 0.0, all || !step.trims);
        step.said.why = !adaptive(step) ? Why::Fixed : step.trims ? Why::Dear : Why::Drafts;
        if (!step.trims) {
            for (int n = 0; n < drafts.widths[i]; ++n) step.kept.push_back(n);
        } else if (!red_ && trusted(*step.row)) {
            for (size_t n = 0; n < step.gains.size(); ++n)
                if (step.gains[n] >= floor || !n) free_.push_back({-step.gains[n], static_cast<int>(i), static_cast<int>(n)});
        } else {
            step.said.why = Why::Lost;
        }
    }
    if (count_ > 1 || drafts.parents) std::sort(free_.begin(), free_.end());
    double saved = 0.0;
    int chosen = free_.empty() ? 0 : worth(saved);
    const int wished = chosen;
    if (chosen && count_ > 1) chosen = bearable(chosen);
    for (int n = 0; n < chosen; ++n) {
        const Free& node = free_[static_cast<size_t>(n)];
        steps_[static_cast<size_t>(node.row)].kept.push_back(node.node);
        steps_[static_cast<size_t>(node.row)].said.why = Why::Drafts;
    }
    if (!chosen) {  // the best node of all may be tried, so that what is known does not grow old
        int best = -1;
        for (size_t i = 0; i < count_; ++i) {
            const Step& step = steps_[i];
            if (step.there && step.row && step.trims &&
                (best < 0 || step.gains[0] > steps_[static_cast<size_t>(best)].gains[0]))
                best = static_cast<int>(i);
            if (wished && step.there && step.row && step.trims) steps_[i].said.why = Why::Others;
        }
        if (best >= 0) {
            Step& step = steps_[static_cast<size_t>(best)];
            const double loss = more(1) + asked_;
            if (bears(loss) && may_try(loss - step.gains[0] / static_cast<double>(count_), 1, step.gains[0])) {
                step.kept.push_back(0);
                step.said.why = Why::Try;
            }
        }
    }
    const double price = rate() * more(1);
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        step.said.size = static_cast<int>(step.kept.size());
        verified_ += step.said.size;
        if (!step.row) continue;
        if (step.there) {
            ++step.row->proposals;
            if (step.trims) {
                if (count_ > 1 || drafts.parents) std::sort(step.kept.begin(), step.kept.end());
                step.row->reach = std::max(kLeastReach, 2 * step.said.size);
                step.said.price = price;
                step.said.brings = step.gains[0];
            }
        }
        if (!step.there || step.trims) ask_again(step, chosen && step.there ? saved * step.said.size / chosen : 0.0);
    }
    fixed_ = asked_for;
}

void Policy::look(Step& step, const Proposal& drafts, size_t i, double floor, bool all) {
    const size_t k = static_cast<size_t>(drafts.widths[i]), at = i * drafts.width;
    step.parents.clear();
    step.depths.clear();
    step.sources.clear();
    step.chances.clear();
    step.learns.clear();
    for (size_t n = 0; n < k; ++n) {
        const int parent = drafts.parents ? drafts.parents[at + n] : static_cast<int>(n) - 1;
        const size_t before = static_cast<size_t>(parent);
        const double above = parent >= 0 ? step.gains[before] : 1.0;
        if (!all && above < floor && !drafts.parents && n) break;
        const int depth = parent >= 0 ? step.depths[before] + 1 : 0;
        const int source = drafts.sources[drafts.source ? drafts.source[at + n] : 0];
        double said = -1.0;
        if (drafts.said) {
            said = drafts.said[at + n];
            if (parent >= 0) said = drafts.said[at + before] > 0 ? said / drafts.said[at + before] : 0.0;
            if (!(said >= 0)) said = 0.0;
        }
        Chance& learns = Chances::of(chances_.table(source, step.kind.sampling), depth, said);
        const double its = learns.given(said < 0 ? Chances::kUnknown : std::min(std::max(said, 0.005), 0.995));
        const double chance = its / (its + (1.0 - its) * step.row->odds[parent >= 0]);
        step.parents.push_back(parent);
        step.depths.push_back(depth);
        step.sources.push_back(source);
        step.gains.push_back(above * chance);
        step.chances.push_back(chance);
        step.learns.push_back(&learns);
    }
}

// How many of the best nodes to verify. Over a long run, tokens per second are greatest when every step maximises
// tokens - rate x seconds (renewal theory); a draft that is better than the long run is taken where its own ratio is
// best, since what is left of it can be proposed again. `saved`: plain steps that this is expected to save.
int Policy::worth(double& saved) {
    const double rows = static_cast<double>(count_), rate = this->rate();
    int best = 0, fastest = 0, hoped = 0;
    double value = 0.0, top = 0.0, hope = 0.0, tokens = 0.0;
    std::vector<double> values(free_.size() + 1, 0.0);
    for (int n = 1; n <= static_cast<int>(free_.size()); ++n) {
        tokens -= free_[static_cast<size_t>(n) - 1].negative;
        const double seconds = more(n), sd = doubt(n);
        const double ratio = (rows + tokens) / (1.0 + seconds + asked_);
        if (too_risky(n, tokens)) break;
        const double its = values[static_cast<size_t>(n)] = tokens - rate * seconds;
        if (its > value) value = its, best = n;
        if (ratio > top) top = ratio, fastest = n;
        const double hopeful = tokens - rate * std::max(seconds - sd, 0.0);
        if (hopeful > hope) hope = hopeful, hoped = n;
    }
    for (size_t i = 0; i < count_; ++i)
        if (steps_[i].there && steps_[i].trims) steps_[i].said.expected = top / rows;
    if (top > rate) best = fastest;
    // What would be best if drafts were cheaper than they are thought, by a deviation, is tried now and then.
    if (hoped > best) {
        const double loss = (values[static_cast<size_t>(best)] - values[static_cast<size_t>(hoped)]) / rate;
        double gain = 0.0;
        for (int n = best; n < hoped; ++n) gain -= free_[static_cast<size_t>(n)].negative;
        const int instead = best;
        if (may_try(loss, hoped, gain)) best = hoped, instead_ = instead;
    }
    saved = std::max(value, 0.0) / rate;
    return best;
}

// How many of the chosen nodes leave every row with no more loss to others than it may have.
int Policy::bearable(int count) const {
    std::vector<double> after(count_);
    while (count) {
        std::fill(after.begin(), after.end(), 0.0);
        for (int n = 0; n < count; ++n) after[static_cast<size_t>(free_[static_cast<size_t>(n)].row)] -= free_[static_cast<size_t>(n)].negative;
        const double loss = more(count) + asked_;
        bool fine = true;
        for (size_t i = 0; i < count_ && fine; ++i) fine = fair(steps_[i], after[i], loss);
        if (fine) break;
        count -= std::max(1, count / 4);
    }
    return count;
}

// When a row asks next: every step while that pays, ever more rarely while it does not.
void Policy::ask_again(Step& step, double saved) {
    if (!step.row || !adaptive(step) || !step.nodes || step.kind.levels >= 0 || whole(step)) return;
    Row& row = *step.row;
    if (step.said.why == Why::Others) {  // it is not this row's fault, so all wait together, to draft together
        blocked_ = kBlocked;
        return;
    }
    row.value += (saved - row.value) / 16;
    const bool sure = step.there && !step.gains.empty() && step.gains[0] >= kSure * rate() * (more(1) + asked_);
    if (saved > 0 || (sure && (red_ || !trusted(row)))) {  // or something else keeps a good draft back
        row.fruitless = 0;
        row.waited = 4;
        return;
    }
    if (++row.fruitless < kPatience) return;
    if (row.value < asking_[static_cast<size_t>(step.kind.drafter)].each / unit_)
        row.wait = row.waited = std::min(2 * row.waited, kLongestWait);
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
        try_credit_ -= more(tried_) - more(instead_) + (instead_ ? 0.0 : asked_) - gain;
    }
    account(accepted, more(verified_ - fixed_), asked_);
    count_ = 0;  // a step is learned from once
}

void Policy::account(const int32_t* accepted, double more, double asked) {
    const double rows = static_cast<double>(count_);
    const int chosen = verified_ - fixed_;
    int all = 0, gained = 0;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        all += accepted[i];
        if (!adaptive(step)) continue;
        gained += accepted[i];
        if (!step.row) continue;
        Row& row = *step.row;
        const double size = static_cast<double>(step.kept.size());
        row.wall += 1.0 + more + asked;
        row.lead += accepted[i] - more - asked;
        if (size > 0) row.balance += accepted[i] / rows - (more + asked) * size / chosen;
    }
    capital_ += kDrip + gained / rows - more - asked;
    capital_ = std::min(std::max(capital_, -kDebt), most_capital());
    try_credit_ = std::min(try_credit_ + kTries, kMostTries);
    if (prefill_) return;
    const double keep = 1.0 - 1.0 / kHorizon, tokens = 1.0 + all / rows;
    tokens_ = tokens_ * keep + tokens;
    plains_ = plains_ * keep + std::min(1.0 + share_ * pace_.more(verified_) + asked, 4.0 + tokens);
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
            if (verified[n]) tried = true;
            else dropped += step.chances[n];
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
        if (!observed_++) observing_ = seconds;
        else follow(observing_, seconds);
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
            if (known > 0) follow(known, sample);
            else known = level > 0 ? std::min(sample, 3 * level) : sample;
        } else {
            const double sample = its / asking.rows;
            if (asking.each > 0) follow(asking.each, sample);
            else asking.each = sample;
        }
    }
}

}  // namespace outpace
