#include "drafting/policy.h"

#include <algorithm>
#include <cmath>

namespace outpace {
namespace {

constexpr double kTries = 0.003;                     // of the time may go into tries
constexpr double kEarly = 8.0;                       // the first ones so much sooner: a few drafts may have had bad luck;
constexpr double kCheap = 0.7;                       // those that take no more plain steps than this
constexpr double kOften = 8.0, kSeldom = 48.0;       // steps between two of them; the latter where the budget is not spent
constexpr int kFruitless = 2;                        // drafts one after the other after which none is wider than was measured
constexpr int kRest = 8, kLongRest = 10'000;         // steps that a drafter rests whose asking does not pay, at least and at most,
constexpr double kAsked = 100.0;                     // and so many times as long as asking all rows takes
constexpr double kOthers = 0.3, kOthersDrip = 0.006;  // plain steps that a row may lose to others' drafts: at first, and in each
constexpr double kReading = 0.005, kMostReading = 64.0;  // of all time, prompts included, that reading may lose; plain steps at most
constexpr double kWholes = 4.0;                      // whole drafts that the hope of one token each counts for

double biased(double chance, double bias) { return chance / (chance + (1.0 - chance) * std::exp(-bias)); }

}  // namespace

// -- rows -------------------------------------------------------------------------------------------------------------

bool Policy::knows(int64_t row, int64_t request) const {
    const auto found = rows_.find(row);
    return found != rows_.end() && found->second.kind.request == request;
}

void Policy::admit(int64_t row, const Kind& kind) {
    release(row);
    Row& own = rows_[row];
    own.kind = kind;
    const Asking& asker = asking_[kind.drafter];
    own.value = asker.value;
    if (kind.reads) own.start = own.read = 0.0;
    if (asker.dear()) own.rests = static_cast<int>(std::max(asker.rested - step_, int64_t{0}));
}

void Policy::release(int64_t row) {
    for (size_t i = 0; i < count_; ++i)
        if (steps_[i].view.row == row) steps_[i].row = nullptr;
    const auto gone = rows_.find(row);
    if (gone == rows_.end()) return;
    if (gone->second.first >= 0) answers_ += (gone->second.last - gone->second.first - answers_) / std::min(++ended_, 32);
    rows_.erase(gone);
}

// -- before drafting --------------------------------------------------------------------------------------------------

void Policy::plan(const std::vector<View>& views, int64_t prefill) {
    count_ = views.size();
    if (!count_) {
        work_ = static_cast<double>(prefill) * costs_.among_many();
        reading_ = std::min(reading_ + kReading * work_, kMostReading);
        return;
    }
    chances_.tick();
    ++step_;
    steps_.resize(std::max(steps_.size(), count_));
    fixed_ = verified_ = 0;
    for (auto& [drafter, asking] : asking_) asking.rows = asking.levels = asking.chosen = asking.deep = 0, asking.saved = -1.0;
    double cached = 0.0;
    bool fixed = false, any = false;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        step.view = views[i];
        step.row = &rows_.at(views[i].row);
        step.kind = step.row->kind;
        step.nodes = step.levels = views[i].adaptive ? 0 : views[i].most;
        step.whole = !views[i].adaptive || !step.kind.trims || step.row->drawn;
        step.floor = 0.0;
        step.start = step.row->start, step.unread = step.tried = false;
        step.draft.clear(), step.paths.clear(), step.words.clear(), step.offers.clear(), step.beside.clear();
        if (step.row->first < 0) step.row->first = views[i].context;
        step.row->last = views[i].context;
        step.kept.clear();
        const double room = static_cast<double>(step.kind.limit) - views[i].context - 1.0;
        const Why barred = room > 1.0 ? Why::Off : Why::NoRoom;
        step.decision = {0, views[i].most ? Why::Fixed : barred, 0.0, static_cast<double>(views[i].most), room, {}};
        cached += views[i].context;
        fixed = fixed || step.nodes;
        any = any || (views[i].adaptive && views[i].most);
    }
    costs_.turn(static_cast<int>(count_), cached, prefill);
    work_ = 1.0 + costs_.prompts();
    reading_ = std::min(reading_ + kReading * work_, kMostReading);
    longest_ = count_ > 1 || prefill ? stretch_ : HUGE_VAL;
    Why none = Why::Fixed;
    if (any) none = !fixed && costs_.wants_plain(advantage_) ? Why::Plain : !fits(1, 0.0) ? Why::Long : none;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        if (!step.view.adaptive || !step.view.most) continue;
        step.decision.why = none;
        if (none == Why::Plain) step.decision.one = costs_.since_plain(), step.decision.two = costs_.compared();
        if (none == Why::Long) because(step, none, {}, 0.0);
        if (none != Why::Fixed) continue;
        const bool rests = step.row->rests > 0;
        step.row->rests -= rests;
        if (rests && (step.kind.levels < 0 || !step.kind.nodes))
            because(step, Why::Rests, {}, 0.0);
        else if (step.kind.levels >= 0)
            step.nodes = step.view.most;  // plan_levels says how many
        else if (!step.whole)
            step.nodes = step.levels = step.view.most;
        else if (plan_whole(step))
            step.nodes = step.levels = step.view.most;
        if (step.whole) fixed_ += step.nodes;
    }
    if (none == Why::Fixed) plan_levels({});
    fixed_ = 0;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        step.planned = step.nodes ? step.levels : 0;
        if (!step.nodes) continue;
        Asking& asking = asking_[step.kind.drafter];
        ++asking.rows;
        asking.chosen += step.view.adaptive;
        if (step.kind.levels >= 0) asking.levels = std::max(asking.levels, step.levels);
    }
}

// Whether a draft that is verified whole or not at all is worth asking for, by what such drafts have brought.
bool Policy::plan_whole(Step& step) {
    const Whole& known = wholes_[{step.kind.drafter, step.kind.sampling}];
    const double gain = (known.gained + kWholes) / (known.drafts + kWholes);
    const double size = known.drafts > 0 ? known.nodes / known.drafts : step.view.most;
    const int nodes = std::max(1, std::min(static_cast<int>(std::lround(size)), step.view.most));
    const double loss = more(nodes) + asking_[step.kind.drafter].each.median();
    step.decision.one = gain;
    step.decision.two = loss * rate();
    step.decision.expected = (1.0 + gain) / (1.0 + loss);
    const bool gains = gain > rate() * loss, pays = gains && loss <= std::max(budget_, kAlways);
    const double asking = loss - more(nodes);
    Choice whole;
    whole.nodes = nodes - 1;  // what refuses it refuses all of it
    if (!fits(step.view.most, asking) || bearable({}, 0, loss) < 0) {
        because(step, fits(step.view.most, asking) ? Why::Others : Why::Long, whole, asking);
        return false;
    }
    const bool tries = !pays && ((!fruitless_ && budget_ >= 0) || may_try(loss, drafted_at_));
    step.decision.why = tries ? Why::Try : Why::Dear;
    if (gains && !pays && !tries) because(step, Why::Spent, whole, asking);
    return pays || tries;
}

// How many forwards each network is worth, for all of its rows together, by how far their drafts went before. Networks of one
// batch compete: the next level is that of the network whose nodes bring most for its time. `beside`: rows whose lookups have
// drafted, and may leave a network less to add than it was expected to bring alone; the others stay as they are.
void Policy::plan_levels(const std::vector<size_t>& beside) {
    struct Network {
        int rows = 0, levels = 0, chosen = 0;
        double level = 0.0, brings = 0.0;  // plain steps of a level; tokens of the next one
    };
    std::vector<size_t> rows;
    std::map<int, Network> drafters;
    for (size_t i = 0; i < count_; ++i) {
        if (steps_[i].kind.levels < 0 || !steps_[i].view.adaptive || !steps_[i].nodes || !steps_[i].row) continue;
        rows.push_back(i);
        const double context = steps_[i].view.context;
        const Row& row = *steps_[i].row;
        if (beside.empty() && steps_[i].kind.reads && context - row.read > kUnread) {
            const Reading reading = this->reading(steps_[i].kind, row.start, row.read, context, context - row.first);
            steps_[i].start = reading.start, steps_[i].unread = !reading.pays();
            steps_[i].decision.one = reading.takes, steps_[i].decision.two = reading.may;
        }
        ++drafters[steps_[i].kind.drafter].rows;
    }
    if (rows.empty()) return;
    double level = 0.0;
    bool known = true;
    for (auto& [drafter, its] : drafters) {
        const Ratios& times = asking_[drafter].at(its.rows);
        level += its.level = times.low();
        known = known && times.measured();
    }
    std::vector<Free> nodes;
    std::vector<double> gains(count_, 1.0);
    double best = 0.0, floor = 0.0, fastest = 1.0, first = 0.0;
    for (const size_t i : rows)
        for (const auto& [depth, gain] : steps_[i].offers) nodes.push_back({gain, static_cast<int>(i), -depth});
    std::sort(nodes.begin(), nodes.end());
    const Choice alone = choose(nodes, 0.0);  // what lookups bring without a network
    if (alone.nodes && bearable(nodes, alone.nodes, 0.0) == alone.nodes)
        best = alone.tokens - rate() * more(alone.nodes), fastest = alone.speed;
    const double without = fastest;
    Why none = budget_ < 0 ? Why::Spent : Why::Levels;
    const auto next = [&](size_t i, int l) {  // the chance of the row's path to its l-th level
        const auto& chances = chances_.table(steps_[i].kind.levels, steps_[i].kind.sampling).levels;
        const double chance = chances[static_cast<size_t>(std::min(l, Chances::kLevels) - 1)].given(Chances::kUnknown);
        return gains[i] * biased(chance, steps_[i].row->bias[steps_[i].kind.levels][l > 1]);
    };
    const auto right = [&](size_t i, int l) {  // the chance that a lookup is, so deep
        const std::vector<double>& found = steps_[i].beside;
        return l <= static_cast<int>(found.size()) ? found[static_cast<size_t>(l) - 1] : 0.0;
    };
    double asking = 0.0;
    for (;;) {
        for (auto& [drafter, its] : drafters) its.brings = 0.0;
        for (const size_t i : rows) {
            Network& its = drafters[steps_[i].kind.drafter];
            const int deepest = its.level > 0 ? steps_[i].nodes : 1;  // until a level's time is known
            if (its.levels < deepest) its.brings += next(i, its.levels + 1) * (1.0 - right(i, its.levels + 1));
        }
        std::vector<std::pair<const int, Network>*> order;  // who brings most for its time comes first
        for (auto& each : drafters)
            if (each.second.brings > 0) order.push_back(&each);
        if (order.empty()) break;
        std::stable_sort(order.begin(), order.end(),
            [](const auto* a, const auto* b) { return a->second.brings * b->second.level > b->second.brings * a->second.level; });
        const auto grown = [&](const std::pair<const int, Network>& each) {  // the nodes, with another level of a network
            std::vector<Free> found = nodes;
            const int l = each.second.levels + 1;
            for (const size_t i : rows) {
                if (steps_[i].kind.drafter != each.first || steps_[i].nodes < l) continue;
                const double gain = next(i, l), others = right(i, l);
                for (Free& node : found)  // the likelier comes first; the other is worth what that leaves
                    if (gain > others && node.row == static_cast<int>(i) && node.node == -l) node.gain *= 1.0 - gain;
                found.push_back({gain > others ? gain : gain * (1.0 - others), static_cast<int>(i), l});
            }
            std::sort(found.begin(), found.end());
            return found;
        };
        // Where rows of the others would fall too far behind for it, one of theirs comes first.
        const auto fair = [&](const auto* each) {
            const std::vector<Free> found = grown(*each);
            const double takes = asking + each->second.level;
            const int most = choose(found, takes).nodes;
            return bearable(found, most, takes) == most;
        };
        const auto chosen = order.size() > 1 ? std::find_if(order.begin(), order.end(), fair) : order.begin();
        auto& [drafter, its] = chosen != order.end() ? **chosen : *order.front();
        nodes = grown({drafter, its});
        ++its.levels, asking += its.level;
        for (const size_t i : rows)
            if (steps_[i].kind.drafter == drafter && steps_[i].nodes >= its.levels) gains[i] = next(i, its.levels);
        if (first == 0.0) first = nodes[0].gain;
        const Choice choice = choose(nodes, asking);
        const double worth = choice.tokens - rate() * (more(choice.nodes) + asking);
        if (choice.nodes) fastest = std::max(fastest, choice.speed);
        if (worth > best && bearable(nodes, choice.nodes, asking) == choice.nodes) {
            best = worth, floor = rate() * (its.level + more(choice.nodes) / choice.nodes);
            for (auto& each : drafters) each.second.chosen = each.second.levels;
        } else if (worth > best) {
            none = Why::Others;
        } else if (!choice.nodes && choice.why != Why::Dear && nodes[0].gain > rate() * (more(1) + asking)) {
            none = choice.why;
        }
    }
    for (const size_t i : beside.empty() ? rows : beside) {
        Step& step = steps_[i];
        asking_[step.kind.drafter].saved = std::min((1.0 / without - 1.0 / fastest) / sees(step.start, step.view.context), 1.0 / without);
        if (beside.empty() || step.tried) continue;
        step.levels = std::min(step.levels, drafters[step.kind.drafter].chosen);
        if (!step.levels) step.planned = 0;
    }
    if (!beside.empty()) return;
    const bool tries = (!known && budget_ >= 0) || may_try(level + more(1), levels_at_);
    const bool tried = best <= 0 && fits(1, level) && tries && bearable({}, 0, level + more(1)) == 0;
    bool asked = false;
    for (const size_t i : rows) {
        Step& step = steps_[i];
        const int levels = tried ? 1 : drafters[step.kind.drafter].chosen;
        step.levels = step.unread ? 0 : std::min(levels, step.nodes);
        step.tried = tried;
        asked = asked || levels;
        // The means say whether to ask; how far to go, each draft. Another level pays if the best path's next node is worth it.
        if (longest_ == HUGE_VAL && best > 0) {
            const Chances::Table& table = chances_.table(step.kind.levels, step.kind.sampling);
            const double price = floor / biased(table.levels[1].given(Chances::kUnknown), step.row->bias[step.kind.levels][1]);
            step.floor = std::pow(price, 1.0 / table.power());  // as its drafter counts
            step.nodes = std::min(step.nodes, std::max(costs_.reach(fruitless_ < kFruitless), step.levels));
        }
        if (!step.kind.nodes)
            step.nodes = step.levels;
        else if (!step.levels && step.row->rests)
            step.nodes = 0;
        if (step.unread) {
            step.decision.why = Why::Unread;
        } else if (!step.nodes && step.kind.nodes) {
            because(step, Why::Rests, {}, 0.0);
        } else if (none == Why::Levels) {
            step.decision.why = none;
            step.decision.one = first, step.decision.two = rate() * (level + more(1));
        } else {
            because(step, none, {}, level);
        }
    }
    if (asked) levels_at_ = step_;
}

// Plain steps that the least patient row may fall further behind plain decoding for what others draft.
double Policy::patience() const {
    double least = HUGE_VAL;
    for (size_t i = 0; i < count_; ++i)
        if (const Row* row = steps_[i].view.adaptive ? steps_[i].row : nullptr)
            least = std::min(least, row->lead + kOthers + kOthersDrip * row->wall);
    return least;
}

// Why a row drafts nothing, with the numbers that decide, where `best` are the nodes that may be verified and one more may not.
void Policy::because(Step& step, Why why, const Choice& best, double asking) const {
    Decision& decision = step.decision;
    const int nodes = best.nodes + 1;
    const double loss = more(nodes) + asking;
    decision.why = why;
    if (why == Why::Rests && step.row) decision.one = asking_.at(step.kind.drafter).each.median(), decision.two = step.row->value;
    if (why == Why::Others) decision.one = loss, decision.two = patience();
    if (why == Why::Spent) decision.one = loss, decision.two = budget_ < 0 ? budget_ : std::max(budget_, kAlways);
    if (why == Why::Long) decision.one = 1.0 + costs_.most(fixed_ + nodes) + asking, decision.two = longest_;
    if (why == Why::Wide) decision.one = nodes, decision.two = costs_.reach(fruitless_ < kFruitless);
}

double Policy::asking(bool own) const {
    double steps = 0.0;
    for (const auto& [drafter, asking] : asking_)
        steps += own ? asking.all(asking.chosen, asking.deep) : asking.all(asking.rows, asking.levels);
    return std::max(steps, 0.0);
}

// Of few values the least counts: a drafter that is thought too dear is not asked, and nothing would correct that.
const Ratios& Policy::Asking::at(int rows) const {
    const int at = static_cast<int>(doublings(rows));
    for (int apart = 0; apart < 8; ++apart)
        for (const int k : {at - apart, at + apart})
            if (k >= 0 && k < 8 && level[static_cast<size_t>(k)].count()) return level[static_cast<size_t>(k)];
    return level[static_cast<size_t>(at)];
}

// -- after drafting ---------------------------------------------------------------------------------------------------

void Policy::trim(const std::vector<const Draft*>& drafts, bool drawn) {
    for (auto& [drafter, asking] : asking_) asking.levels = asking.deep = 0;
    free_.clear();
    fixed_ = 0;
    int own = 0;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        const Draft& draft = *drafts[i];
        if (step.kind.levels >= 0 && step.nodes) {  // what was allowed may not have been drafted
            if (draft.levels >= 0) step.levels = draft.levels;
            Asking& asking = asking_[step.kind.drafter];
            asking.levels = std::max(asking.levels, step.levels);
            if (step.view.adaptive) asking.deep = std::max(asking.deep, step.levels);
        }
        step.kept.clear();
        if (draft.tokens.empty()) {
            if (step.nodes && (step.levels || step.kind.levels < 0)) {
                step.decision.why = Why::Nothing;
                step.decision.one = 0.0, step.decision.two = step.nodes;
            }
            continue;
        }
        if (!step.row) continue;
        Why& why = step.decision.why;
        if (drawn && step.kind.rejection) {
            if (!step.whole) why = Why::Try;  // it was asked before it was known that its draft cannot be cut
            step.row->drawn = step.whole = true;
        }
        look(step, draft);
        const int size = static_cast<int>(step.draft.size());
        why = !step.whole ? Why::Dear : !step.view.adaptive ? Why::Fixed : why == Why::Try ? Why::Try : Why::Drafts;
        if (why == Why::Fixed) step.decision.one = step.view.most, step.decision.two = size;
        for (int n = 0; n < size; ++n) {
            if (step.whole)
                step.kept.push_back(n);
            else
                free_.push_back({step.draft[static_cast<size_t>(n)].gain, static_cast<int>(i), n});
        }
        if (step.whole) fixed_ += size;
        if (!step.view.adaptive) own += size;
    }
    std::sort(free_.begin(), free_.end());
    const double asking = this->asking();
    const Choice best = choose(free_, asking);
    const double saved = std::max(best.tokens / rate() - more(best.nodes), 0.0);
    int chosen = std::max(bearable(free_, best.nodes, asking), 0);
    bool tries = false;
    if (budget_ > 1.0 && static_cast<double>(step_ - tried_at_) >= kOften) {  // what would be best if nodes cost as little as they may
        const int hoped = bearable(free_, choose(free_, asking, true).nodes, asking);
        if (hoped > chosen) chosen = hoped, tries = true;
    }
    const bool curious = budget_ >= 0 && (!fruitless_ || !costs_.measured(1));
    if (!chosen && !free_.empty() && fits(1, asking) && bearable({}, 0, more(1) + asking) == 0)
        tries = curious || may_try(more(1), drafted_at_), chosen = tries;
    if (tries) tried_at_ = step_;
    for (int n = 0; n < static_cast<int>(free_.size()); ++n) {
        Step& step = steps_[static_cast<size_t>(free_[static_cast<size_t>(n)].row)];
        if (n < chosen) {
            step.kept.push_back(free_[static_cast<size_t>(n)].node);
            step.decision.why = tries ? Why::Try : Why::Drafts;
        } else if (step.kept.empty() && step.decision.why == Why::Dear) {  // its best node says why
            step.decision.why = n < best.nodes ? Why::Others : best.why;
        }
    }
    verified_ = 0;
    for (size_t i = 0; i < count_; ++i) {
        Step& step = steps_[i];
        std::sort(step.kept.begin(), step.kept.end());
        Decision& decision = step.decision;
        decision.size = static_cast<int>(step.kept.size());
        verified_ += decision.size;
        if (!step.draft.empty() && !step.whole) {
            decision.expected = best.speed;
            const bool pays = decision.why == Why::Drafts;
            decision.one = pays ? best.tokens : step.draft[0].gain;
            decision.two = rate() * more(pays ? best.nodes : 1);
            if (!decision.size && decision.why != Why::Dear) because(step, decision.why, best, asking);
        }
        if (explain)
            for (const Node& node : step.draft) decision.worth.push_back(node.gain);
        if (!step.row || !step.nodes || step.whole || step.levels * (step.kind.levels >= 0) > 0) continue;
        Row& row = *step.row;  // it asks every step while that pays, and seldom while it does not
        Asking& asker = asking_[step.kind.drafter];
        const double value = chosen && !tries ? saved * decision.size / chosen : 0.0;
        row.value += (value - row.value) / 12;
        asker.value += (value - asker.value) / (asker.asked = std::min(asker.asked + 1, 48));
        if (row.value >= asker.each.median()) continue;
        row.rests = kRest;
        if (!asker.dear()) continue;
        const double steps = std::min(kAsked * asker.each.low() * static_cast<double>(count_), double{kLongRest});
        row.rests = std::max(row.rests, static_cast<int>(steps));
        asker.rested = step_ + row.rests;
    }
    fixed_ = own;
}

// The learned chance of a node, given its parent's, by what was said of it.
double Policy::chance(const Step& step, Word& word) const {
    const double said = word.said < 0 ? Chances::kUnknown : word.second ? word.said : std::pow(word.said, word.table->power());
    word.chance = word.learns->given(said);
    if (!word.second)
        word.chance = biased(word.chance, step.row->bias[word.source][step.paths[static_cast<size_t>(word.path)].parent >= 0]);
    return word.chance;
}

// The path to a draft's node n, which `source` proposes (-1: the node's own); `places`: the paths of the nodes before it.
int Policy::hear(Step& step, const Draft& draft, size_t n, int source, const std::vector<int>& places) {
    const auto gain_of = [&](size_t node) -> double { return static_cast<float>(draft.gains[node]); };  // as Drafts have it
    const int32_t parent = draft.parents[n];
    const int above = parent < 0 ? -1 : places[static_cast<size_t>(parent)];
    const auto same = [&](const Path& path) { return path.parent == above && path.token == draft.tokens[n]; };
    const auto known = std::find_if(step.paths.begin(), step.paths.end(), same);
    const int path = static_cast<int>(known - step.paths.begin());
    if (source < 0) source = draft.sources[n];
    const auto of_it = [&](const Word& word) { return word.path == path && word.source == source; };
    if (known == step.paths.end())
        step.paths.push_back({above, draft.tokens[n], above < 0 ? 0 : step.paths[static_cast<size_t>(above)].depth + 1});
    else if (std::any_of(step.words.begin(), step.words.end(), of_it))
        return path;
    double said = gain_of(n);  // of the whole path
    if (std::isnan(said))
        said = -1.0;
    else if (parent >= 0)
        said = gain_of(static_cast<size_t>(parent)) > 0 ? said / gain_of(static_cast<size_t>(parent)) : 0.0;
    const bool second = std::find(draft.parents.begin(), draft.parents.begin() + static_cast<std::ptrdiff_t>(n), parent) !=
                        draft.parents.begin() + static_cast<std::ptrdiff_t>(n);
    Chances::Table& table = chances_.table(source, step.kind.sampling);
    Chance& learns = Chances::of(table, step.paths[static_cast<size_t>(path)].depth, said, second);
    step.words.push_back({path, source, said < 0 ? said : std::min(std::max(said, 0.005), 0.995), second, &table, &learns});
    return path;
}

void Policy::rate(size_t place, int64_t row, int source, Draft& draft) {
    if (place >= count_ || steps_[place].view.row != row || !steps_[place].row) return;
    Step& step = steps_[place];
    std::vector<int> places;
    std::vector<double> gains;
    for (size_t n = 0; n < draft.size(); ++n) {
        places.push_back(hear(step, draft, n, source, places));
        const auto said = [&](Word& word) { return word.path == places[n] && word.source == source; };
        const double its = chance(step, *std::find_if(step.words.begin(), step.words.end(), said));
        gains.push_back(its * (draft.parents[n] < 0 ? 1.0 : gains[static_cast<size_t>(draft.parents[n])]));
    }
    draft.gains = std::move(gains);
}

void Policy::plan_beside(const std::vector<Found>& found) {
    std::vector<size_t> beside;
    bool any = false;
    for (const auto& [place, row, draft, at] : found) {
        if (place >= count_ || steps_[place].view.row != row) continue;
        Step& step = steps_[place];
        beside.push_back(place);
        asking_[step.kind.drafter].saved = -1.0;
        any = any || step.levels || step.unread;
        const std::vector<int> depths = draft->depths();
        step.beside.assign(depths.size(), 0.0);
        for (size_t n = 0; n < depths.size(); ++n) {
            double& right = step.beside[static_cast<size_t>(depths[n]) - 1];
            right = std::min(right + draft->gains[n], 1.0);
            step.offers.emplace_back(depths[n], draft->gains[n]);
        }
    }
    if (any) plan_levels(beside);
}

void Policy::look(Step& step, const Draft& draft) {
    step.draft.clear();
    std::vector<double> lefts(draft.tokens.size() + 1, 1.0);  // chances of children that were not seen, by parent: one is accepted
    std::vector<int> places;
    for (size_t n = 0; n < draft.tokens.size(); ++n) {
        const int parent = draft.parents[n];
        const Node* above = parent >= 0 ? &step.draft[static_cast<size_t>(parent)] : nullptr;
        double& left = lefts[static_cast<size_t>(parent + 1)];
        places.push_back(hear(step, draft, n, -1, places));
        double its = 0.0;
        for (Word& word : step.words)
            if (word.path == places[n]) its = std::max(its, chance(step, word));
        const double chance = std::min(its, left);
        left = std::max(left - chance, 0.0);
        step.draft.push_back({parent, places[n], (above ? above->gain : 1.0) * chance, chance});
    }
}

// How many of the best nodes to verify. Over a long run, tokens per second are greatest when every step maximises
// tokens - rate x seconds (renewal theory); a draft that is better than the long run is taken where its own ratio is best,
// since what is left of it can be proposed again.
Policy::Choice Policy::choose(const std::vector<Free>& free, double asking, bool hopeful) const {
    Choice best, fastest;
    if (budget_ < 0) best.why = Why::Spent;
    if (budget_ < 0) return best;
    double worth = 0.0, tokens = 0.0;
    const double rows = static_cast<double>(count_), rate = this->rate();
    const int reach = costs_.reach(fruitless_ < kFruitless);
    Why refused = Why::Dear;
    int n = 1;
    for (; n <= static_cast<int>(free.size()); ++n) {
        tokens += free[static_cast<size_t>(n) - 1].gain;
        const double cost = hopeful ? least(n) : more(n), value = tokens - rate * cost;
        const bool measured = n <= reach, pauses = cost > std::max(budget_, kAlways), fine = fits(n, asking);
        if (!measured || !fine || pauses) {
            if (value > worth) refused = !fine ? Why::Long : pauses ? Why::Spent : Why::Wide;
            break;
        }
        const double speed = (1.0 + tokens / rows) / (1.0 + cost + asking);
        if (speed > fastest.speed) fastest = {n, tokens, speed};
        if (value > worth) worth = value, best = {n, tokens, speed};
    }
    best.speed = fastest.speed;
    Choice& found = fastest.speed > advantage_ ? fastest : best;
    if (found.nodes == n - 1) found.why = refused;
    return found;
}

// How many of so many nodes leave no row further behind plain decoding than it may fall for what others draft. Rows that
// opted out are not asked: the batch as a whole must gain.
int Policy::bearable(const std::vector<Free>& free, int nodes, double asking) const {
    if (count_ == 1) return nodes;
    for (std::vector<double> gains(count_);; nodes -= std::max(1, nodes / 4)) {
        std::fill(gains.begin(), gains.end(), 0.0);
        for (int n = 0; n < nodes; ++n) gains[static_cast<size_t>(free[static_cast<size_t>(n)].row)] += free[static_cast<size_t>(n)].gain;
        const double loss = more(nodes) + asking;
        bool fine = true;
        for (size_t i = 0; i < count_; ++i) {
            const Row* row = steps_[i].view.adaptive ? steps_[i].row : nullptr;
            fine = fine && (!row || gains[i] >= loss || row->lead + kOthers + kOthersDrip * row->wall + gains[i] >= loss);
        }
        if (fine) return nodes;
        if (!nodes) return -1;
    }
}

// Whether to spend something where nothing is thought to pay, so that what is known does not grow old.
bool Policy::may_try(double cost, int64_t last) const {
    const double early = cost > kCheap ? 1.0 : std::min(1.0, (1.0 + tries_) / kEarly);
    const double gap = std::max(early * cost / kTries, kOften);
    return static_cast<double>(step_ - last) >= (budget_ < 0 ? gap : std::min(gap, kSeldom));
}

}  // namespace outpace
