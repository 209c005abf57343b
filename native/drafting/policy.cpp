// The policy's decisions: what to ask for before drafting, and what to verify of what was drafted.
#include "drafting/policy.h"

#include <cmath>
#include <stdexcept>
#include <utility>

namespace outpace {
namespace {

constexpr int kLeastReach = 6;         // nodes that a row may always ask for
constexpr int kFirstLevels = 4;        // levels that are drafted until a level's time is known
constexpr double kFewer = 0.75;        // of the rows beside which it waits: then it may pay now
constexpr double kWholeGain = 1.0, kWholeDrafts = 4.0;  // tokens that an unknown whole draft is hoped to bring; drafts that counts for

}  // namespace

// -- before drafting --------------------------------------------------------------------------------------------------

void Policy::plan(const std::vector<View>& views, int64_t prefill) {
    chances_.tick();
    count_ = views.size();
    if (steps_.size() < count_) steps_.resize(count_);
    prefill_ = prefill;
    fixed_ = verified_ = tried_ = instead_ = 0;
    first_ = red_ = network_try_ = false;
    asked_ = levels_ = 0.0;
    rests_ = std::max(rests_ - 1, 0);
    for (Asking& asking : asking_) asking.rows = asking.levels = 0;
    double cached = 0.0;
    bool fixed = false, any = false;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        step.view = views[i];
        step.row = &rows_.at(views[i].row);
        step.kind = step.row->kind;
        step.nodes = step.levels = views[i].adaptive ? 0 : views[i].most;
        step.there = step.asks = step.waits = false;
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
    room_ = count_ > 1 || prefill_ ? stretch_ - 1.0 - share_ * pace_.prompts() : HUGE_VAL;
    held_ = 0.0, wholes_planned_ = 0;
    const auto all = [this](Why why) {
        for (size_t i = 0; i < count_; ++i)
            if (adaptive(steps_[i]) && steps_[i].view.most) steps_[i].said.why = why;
    };
    if (any && !fixed && pace_.wants_plain(advantage_)) {
        all(Why::Plain);
    } else if (any && !fits(1, 0.0)) {
        all(Why::Long);
    } else if (any && blocked_) {
        --blocked_;
        all(Why::Others);
    } else if (any) {
        red_ = capital_ < 0;
        for (size_t i = 0; i < count_; ++i) {
            Step& step = steps_[i];
            Row& row = *step.row;
            if (!adaptive(step) || !step.view.most) continue;
            if (static_cast<double>(count_) < kFewer * static_cast<double>(row.crowd)) row.wait = 0;
            step.waits = row.wait > 0;
            row.wait -= step.waits;
            if (step.kind.levels >= 0) {
                step.nodes = step.view.most;  // plan_levels says how many, and whether its network is asked though it waits
            } else if (step.waits) {
                step.said.why = Why::Waits;
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
    levels_ = forwards() / unit_;
    asked_ = asking() / unit_ + levels_;
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
    const bool pays = !red_ && gain > rate() * loss && trusted(row) && !too_risky(nodes, gain, capital_);
    const double missing = loss - gain / static_cast<double>(count_);
    const bool short_enough = fits(wholes_planned_ + step.view.most, held_);
    if (short_enough && (pays || (bears(loss) && may_try(missing, nodes, gain)))) {
        wholes_planned_ += step.view.most;
        return true;
    }
    step.said.why = !short_enough ? Why::Long : trusted(row) ? Why::Dear : Why::Lost;
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
            const Chance& chance =
                chances_.table(step.kind.levels, step.kind.sampling).levels[static_cast<size_t>(std::min(l, Chances::kLevels) - 1)];
            const double its = chance.given(Chances::kUnknown);
            gains[i] *= its / (its + (1.0 - its) * row.odds[l > 1]);
            if (!may_ask(row)) continue;
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
            if (too_risky(n, tokens, std::min(capital_, network_)) || !fits(wholes_planned_ + n, held_ + l * level)) break;
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
        for (size_t i = 0; i < count_ && count_ > 1; ++i) bearable = bearable && fair(steps_[i], after[i], more(chosen) + l * level);
        if (bearable) top = here, best = std::move(depth);
    }
    if (top <= 0.0) {
        const double loss = level + more(1);
        if (!rests_ && fits(wholes_planned_ + 1, held_ + level) && bears(loss) &&
            may_try(loss - first / static_cast<double>(count_), 1, first, true))
            for (size_t i = 0; i < count_; ++i)
                if (steps_[i].kind.drafter == drafter && steps_[i].kind.levels >= 0 && adaptive(steps_[i]) && steps_[i].nodes &&
                    gains[i] < 1.0) {
                    best[i] = 1;
                    steps_[i].asks = true;
                    break;
                }
    }
    held_ += level * *std::max_element(best.begin(), best.end());
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        if (step.kind.drafter != drafter || step.kind.levels < 0 || !adaptive(step) || !step.nodes) continue;
        step.levels = best[i];
        step.said.why = Why::Levels;
        if (!step.kind.nodes)
            step.nodes = best[i];
        else if (!best[i])
            step.nodes = step.waits ? 0 : std::min(step.nodes, step.row->reach);
        if (step.waits && !step.nodes) step.said.why = Why::Waits;
    }
}

// -- after drafting ---------------------------------------------------------------------------------------------------

void Policy::trim(const Proposal& drafts, bool all) {
    if (drafts.levels) count_levels(drafts.levels);
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
        if (!adaptive(step))
            fixed_ += drafts.widths[i];
        else if (!step.trims)
            wholes += drafts.widths[i];
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
        } else {
            const bool others = !red_ && trusted(*step.row), network = step.asks || may_ask(*step.row);
            std::vector<char> may(step.gains.size());
            for (size_t n = 0; n < step.gains.size(); ++n) {
                may[n] = (is_network(step, n) ? network : others) && (step.parents[n] < 0 || may[static_cast<size_t>(step.parents[n])]);
                if (may[n] && (step.gains[n] >= floor || !n)) free_.push_back({-step.gains[n], static_cast<int>(i), static_cast<int>(n)});
            }
            if (std::find(may.begin(), may.end(), 1) == may.end()) step.said.why = Why::Lost;
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
            if (step.there && step.row && step.trims && (best < 0 || step.gains[0] > steps_[static_cast<size_t>(best)].gains[0]))
                best = static_cast<int>(i);
            if (wished && step.there && step.row && step.trims) steps_[i].said.why = Why::Others;
        }
        if (best >= 0) {
            Step& step = steps_[static_cast<size_t>(best)];
            const double loss = more(1) + asked_;
            const bool network = is_network(step, 0);
            if (!(network && rests_) && fits(1, asked_) && bears(loss) &&
                may_try(loss - step.gains[0] / static_cast<double>(count_), 1, step.gains[0], network)) {
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
        const int number = drafts.source ? drafts.source[at + n] : 0, source = drafts.sources ? drafts.sources[number] : number;
        double said = -1.0;
        if (drafts.said && !std::isnan(drafts.said[at + n])) {
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
    double capital = capital_;
    for (int n = 1; n <= static_cast<int>(free_.size()); ++n) {
        const Free& next = free_[static_cast<size_t>(n) - 1];
        tokens -= next.negative;
        if (is_network(steps_[static_cast<size_t>(next.row)], static_cast<size_t>(next.node))) capital = std::min(capital_, network_);
        const double seconds = more(n), sd = doubt(n);
        const double ratio = (rows + tokens) / (1.0 + seconds + asked_);
        if (too_risky(n, tokens, capital) || !fits(n, asked_)) break;
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
        for (int n = 0; n < count; ++n)
            after[static_cast<size_t>(free_[static_cast<size_t>(n)].row)] -= free_[static_cast<size_t>(n)].negative;
        const double loss = more(count) + asked_;
        bool fine = true;
        for (size_t i = 0; i < count_ && fine; ++i) fine = fair(steps_[i], after[i], loss);
        if (fine) break;
        count -= std::max(1, count / 4);
    }
    return count;
}

}  // namespace outpace
