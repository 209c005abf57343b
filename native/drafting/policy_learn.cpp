// What the policy learns from a step: acceptance, its budget, and what asking takes.
#include <algorithm>
#include <cmath>

#include "drafting/policy.h"

namespace outpace {
namespace {

constexpr double kDrip = 0.004;                      // plain steps that the budget grows in each step,
constexpr double kMost = 3.0;                        // and that it holds at most, and 4 times the advantage
constexpr double kHorizon = 48.0;                    // plain steps over which the rate is averaged
constexpr double kPiece = 64.0;                      // most tokens that rows catch up with in a step: CATCH_UP of own_cache.py
constexpr double kBlind = 8.0;                       // share of what drafts save that is lost behind n tokens alone, times sqrt(n)
constexpr double kTail = 64.0;                       // tokens of a prompt that are read, at least
constexpr double kLevel = 0.15;                      // plain steps of its forward, until that is known
constexpr double kUnreadLevel = 0.5;                 // most plain steps that a level counts as in such a step
constexpr double kRate = 0.15, kLimit = 3.0;         // of a row's bias, in log-odds a trial

}  // namespace

void Policy::learn(const Of& paths, const Of& tokens, const Seconds& seconds, double experts) {
    if (!count_) return;
    for (size_t i = 0; i < count_; ++i) count(steps_[i], *paths[i], *tokens[i]);
    settle(paths);
    read();
    time_drafting(seconds);
    costs_.learn(verified_, seconds.body, experts);
    count_ = 0;  // a step is learned from once
}

// Whether the row's network alone has proposed the path.
bool Policy::added(const Step& step, int path) {
    return std::none_of(
        step.words.begin(), step.words.end(), [&](const Word& word) { return word.path == path && word.source != step.kind.levels; });
}

void Policy::settle(const Of& paths) {
    const auto chooses = [](const Step& step) { return step.view.adaptive; };
    if (std::none_of(steps_.begin(), steps_.begin() + static_cast<std::ptrdiff_t>(count_), chooses)) return;
    const int chosen = verified_ - fixed_;
    const double loss = more(chosen) + asking(true);
    double all = 0.0, gained = 0.0, read = 0.0, readers = 0.0;
    int own = 0;  // nodes that networks alone proposed, which read for them
    for (size_t i = 0; i < count_; ++i) {
        const Step& step = steps_[i];
        const double accepted = static_cast<double>(paths[i]->size());
        all += accepted;
        if (!step.view.adaptive) continue;
        gained += accepted;
        if (step.kind.reads && step.levels > 0) {
            const auto its = [&](int32_t node) { return added(step, step.draft[static_cast<size_t>(node)].path); };
            own += static_cast<int>(std::count_if(step.kept.begin(), step.kept.end(), its));
            read += static_cast<double>(std::count_if(
                paths[i]->begin(), paths[i]->end(), [&](int32_t node) { return its(step.kept.at(static_cast<size_t>(node))); }));
            ++readers;
        }
        if (!step.row) continue;
        steps_[i].row->wall += 1.0 + loss;
        steps_[i].row->lead += accepted - loss;
    }
    const double rows = static_cast<double>(count_);
    const double seen = std::max(loss, costs_.seen(chosen) + asking(true));
    reading_ += (read - readers * (more(chosen) - more(chosen - own) + asking(true))) / rows;
    const double charged = costs_.measured(chosen) ? seen : std::min(seen, kAlways);
    if (chosen && budget_ < 0) ++tries_;
    budget_ = std::min(budget_ + kDrip + gained / rows - charged, kMost + 4.0 * (advantage_ - 1.0));
    if (chosen) drafted_at_ = step_, fruitless_ = gained > 0 ? 0 : fruitless_ + 1;
    if (costs_.prompts() > 0) return;
    const double took = 1.0 + costs_.more(verified_) + asking(), keep = std::exp(-took / kHorizon);
    tokens_ = tokens_ * keep + 1.0 + all / rows;
    plains_ = plains_ * keep + took;
    advantage_ = std::min(std::max(tokens_ / plains_, 1.0), 16.0);
}

// Everything that was said of a child of the pending token or of an accepted node, if it was verified, or another child of that
// node was: then the token that was committed there says whether it would have been right. A drafter whose tokens are verified
// only where a better one proposes them too would seem to be as good as that one.
void Policy::count(Step& step, const std::vector<int32_t>& path, const std::vector<int32_t>& tokens) {
    std::vector<bool> good(step.draft.size()), kept(step.paths.size()), right(step.paths.size()), tried(step.paths.size() + 1);
    for (const int32_t node : path) good[static_cast<size_t>(step.kept.at(static_cast<size_t>(node)))] = true;
    for (const int node : step.kept) {
        const auto at = static_cast<size_t>(step.draft[static_cast<size_t>(node)].path);
        kept[at] = tried[static_cast<size_t>(step.paths[at].parent + 1)] = true;
        right[at] = right[at] || good[static_cast<size_t>(node)];
    }
    for (const Word& word : step.words) {
        const auto at = static_cast<size_t>(word.path);
        const auto& [parent, token, depth] = step.paths[at];
        if ((parent >= 0 && !right[static_cast<size_t>(parent)]) || !tried[static_cast<size_t>(parent + 1)]) continue;
        if (!kept[at] && (step.kind.rejection || static_cast<size_t>(depth) >= tokens.size())) continue;
        const bool its = kept[at] ? right[at] : tokens[static_cast<size_t>(depth)] == token;
        word.learns->learn(its);
        if (word.second) continue;
        if (word.said > 0) word.table->learn(word.said, its);
        if (!step.row) continue;
        double& bias = step.row->bias[word.source][parent >= 0];
        bias = std::max(-kLimit, std::min(kLimit, bias + kRate * (its - word.chance)));
    }
    if (step.kind.levels >= 0) count_levels(step, good);
    if (step.view.adaptive && step.whole && !step.kept.empty()) {
        Whole& known = wholes_[{step.kind.drafter, step.kind.sampling}];
        known = {known.drafts * 0.98 + 1, known.gained * 0.98 + static_cast<double>(path.size()),
            known.nodes * 0.98 + static_cast<double>(step.kept.size())};
    }
}

// How far the drafts of whoever pays by the level went: a level after which there was no node brought nothing. Nodes that
// were not verified count for what was expected of them.
void Policy::count_levels(Step& step, const std::vector<bool>& good) {
    auto& levels = chances_.table(step.kind.levels, step.kind.sampling).levels;
    double dropped = 0.0;
    bool tried = false;
    int last = -1, depth = 0;  // of its own path, which a lookup's may have left
    for (size_t n = 0; n < step.draft.size(); ++n) {
        const Node& node = step.draft[n];
        const auto its = [&](const Word& word) { return word.path == node.path && word.source == step.kind.levels; };
        if (node.parent != last || std::none_of(step.words.begin(), step.words.end(), its)) continue;
        if (good[n]) {
            levels[std::min(static_cast<size_t>(depth), levels.size() - 1)].learn(1.0);
            last = static_cast<int>(n), ++depth, dropped = 0.0, tried = false;
        } else if (std::find(step.kept.begin(), step.kept.end(), static_cast<int>(n)) != step.kept.end()) {
            tried = true;
        } else {
            dropped += node.chance;
        }
    }
    if (depth < step.levels) levels[std::min(static_cast<size_t>(depth), levels.size() - 1)].learn(tried ? 0.0 : std::min(dropped, 1.0));
}

// A network that was not asked for long, or never by a row, reads a prompt or an answer first: that is not what a level takes.
// A draft model that has much to read does so in pieces, and drafts nothing meanwhile.
void Policy::read() {
    for (auto& [drafter, asking] : asking_) {
        asking.behind = false, asking.unread = 0.0;
        if (asking.saved >= 0.0) asking.saves += (asking.saved - asking.saves) / 16.0;
    }
    for (size_t i = 0; i < count_; ++i) {
        const Step& step = steps_[i];
        if (!step.row || step.kind.levels < 0 || !step.nodes || (step.kind.reads ? step.planned : step.levels) <= 0) continue;
        Asking& asking = asking_[step.kind.drafter];
        const double read = std::max(step.row->read, step.start), unread = step.view.context - read;
        const double now = step.levels > 0 ? unread : std::min(unread, std::max(std::floor(kPiece / std::max(asking.rows, 1)), kUnread));
        step.row->start = step.start, step.row->read = step.levels > 0 ? step.view.context : read + now;
        asking.behind |= unread > kUnread;
        if (step.kind.reads && unread > kUnread) asking.unread += now;
    }
}

// Of what drafts save once all before a token is read, the share that those save who know only what is behind `start`.
double Policy::sees(double start, double end) { return start > 0 ? std::max(1.0 - kBlind / std::sqrt(end - start), 0.1) : 1.0; }

Policy::Reading Policy::reading(const Kind& kind, double start, double read, double end, double said) const {
    const auto found = asking_.find(kind.drafter);
    double token = kLevel * costs_.among_many(), saves = kSaves;
    bool known = false;  // what reading takes
    if (found != asking_.end()) {
        const Asking& asking = found->second;
        saves = asking.saves;
        known = asking.token.measured();
        if (known)
            token = asking.token.median();
        else if (asking.at(1).measured())
            token = asking.at(1).median() * costs_.among_many();
    }
    const double left = std::min(static_cast<double>(kind.limit - kind.prompt) - said, std::max(answers_, said));
    const auto from = [&](double first, double unread) { return Reading{first, unread * token, left * saves * sees(first, end)}; };
    const auto tail = [&](double n) { return std::min(std::max(std::floor(n), kTail), end); };
    const auto worth = [](const Reading& reading) { return reading.may - reading.takes; };
    const double n = tail(std::pow(left * saves * kBlind / (2.0 * token), 2.0 / 3.0));  // of so many more is gained than lost
    Reading best = from(end - n, n);
    const Reading on = from(start, end - read), all = start > 0 ? from(0.0, end) : on;
    if (worth(on) > worth(best) && (known || read > start)) best = on;
    if (worth(all) > worth(best) && known) best = all;
    // What was begun goes on, and never from earlier on: its drafter keeps where it began.
    if (read > start && (best.start <= start || reading_ < 0.0)) return on;
    if (reading_ < 0.0) return {best.start, best.takes, 0.0};
    if (!best.pays()) best = from(end - tail(reading_ / token), tail(reading_ / token));  // what the budget covers, to learn
    best.may = std::max(best.may, reading_);
    return best;
}

void Policy::has_read(int64_t row, double start, double read) {
    const auto found = rows_.find(row);
    if (found != rows_.end()) found->second.start = start, found->second.read = read;
}

void Policy::time_reading(const Kind& kind, int64_t tokens, double seconds, double body) {
    if (tokens < 1 || !(body > 0) || !(seconds > 0)) return;
    const double took = seconds / body * (work_ + (count_ ? costs_.more(verified_) : 0.0));
    reading_ -= took;
    asking_[kind.drafter].token.add(took / static_cast<double>(tokens));
}

// Splits the draft phase among those that were asked, by what they were expected to take. Both phases are of one moment, so
// their ratio is not disturbed.
void Policy::time_drafting(const Seconds& seconds) {
    if (costs_.prompts() > 0 || !(seconds.body > 0) || !(seconds.draft >= 0)) return;
    const double spent = seconds.draft / seconds.body * (1.0 + costs_.more(verified_)), expected = asking();
    int askers = 0;
    for (const auto& [drafter, asking] : asking_) askers += asking.rows > 0;
    for (auto& [drafter, asking] : asking_) {
        if (!asking.rows) continue;
        const double its = askers > 1 && expected > 0 ? spent * asking.all(asking.rows, asking.levels) / expected : spent / askers;
        const double reading = asking.levels ? its - asking.all(asking.rows, asking.levels) : its;
        if (asking.unread > 0 && (!asking.levels || asking.at(asking.rows).measured())) {
            asking.token.add(std::max(reading, 0.0) / asking.unread);
            reading_ -= std::max(reading, 0.0);
        }
        if (!asking.levels) {
            if (!asking.behind) asking.each.add(its / asking.rows);
            continue;
        }
        const double level = std::max(its - asking.rows * asking.each.median(), 0.0) / asking.levels;
        Ratios& times = asking.level[doublings(asking.rows)];
        if (!asking.behind)
            times.add(level);
        else if (!times.measured())
            times.add(std::min(level, kUnreadLevel));
    }
}

}  // namespace outpace
