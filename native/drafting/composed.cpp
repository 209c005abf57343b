#include "drafting/composed.h"

#include <algorithm>
#include <utility>

#include "drafting/merge.h"
#include "drafting/policy.h"
#include "runtime/kv.h"

namespace outpace {

ComposedDrafter::ComposedDrafter(std::vector<Part> parts) : parts_(std::move(parts)) {
    std::vector<int> turns;
    bool any = false;
    for (const Part& part : parts_) {
        any = any || part.stepwise;
        turns.push_back(2 * part.draws + (part.stepwise || (any && part.fallback)));  // a fallback comes after what is before it
        order_.push_back(order_.size());
    }
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return turns[a] < turns[b]; });
    for (const Part& part : parts_) {
        draws_ = draws_ || part.draws;
        stepwise_ = stepwise_ || part.stepwise;
        if (part.drafter) layers_.insert(layers_.end(), part.drafter->hidden_layers().begin(), part.drafter->hidden_layers().end());
    }
    std::sort(layers_.begin(), layers_.end());
    layers_.erase(std::unique(layers_.begin(), layers_.end()), layers_.end());
}

ComposedDrafter::Slots::Slots(const ComposedDrafter& composed, const std::vector<Asked>& rows)
    : composed_(composed), rows_(rows), drafts_(rows.size(), std::vector<Draft>(composed.parts_.size())), depths_(rows.size()) {}

std::vector<Asked> ComposedDrafter::Slots::wanted(size_t part, std::vector<size_t>& at) {
    const Part& each = composed_.parts_.at(part);
    if (each.stepwise && !weighed_) weigh();
    if (each.draws && !settled_) settle();
    std::vector<Asked> asked;
    at.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
        const int size = each.draws ? left_[i] : rows_[i].size;
        const auto before = drafts_[i].begin() + static_cast<std::ptrdiff_t>(part);
        if (each.stepwise && rows_[i].adaptive && !rows_[i].levels) continue;
        if (!size || (each.fallback && std::any_of(drafts_[i].begin(), before, [](const Draft& tree) { return !tree.empty(); }))) continue;
        asked.push_back(rows_[i]);
        asked.back().size = size;
        asked.back().policy = nullptr;  // a composition in this one has other numbers
        at.push_back(i);
    }
    return asked;
}

void ComposedDrafter::Slots::ask(size_t part, const std::vector<Asked>& asked, const std::vector<size_t>& at) {
    if (asked.empty()) return;
    std::vector<Draft> drafts;
    try {
        composed_.parts_.at(part).drafter->propose(asked, drafts);
    } catch (const MemoryLimit&) { return; }
    for (size_t i = 0; i < at.size(); ++i) put(part, at[i], std::move(drafts[i]));
}

void ComposedDrafter::Slots::put(size_t part, size_t row, Draft draft) {
    const Asked& asked = rows_.at(row);
    std::fill(draft.sources.begin(), draft.sources.end(), static_cast<int>(part));
    if (composed_.parts_.at(part).stepwise) depths_[row] = std::max(depths_[row], draft.levels < 0 ? asked.depth() : draft.levels);
    if (asked.policy && !asked.drawn) asked.policy->rate(asked.place, asked.row, asked.sources->at(part), draft);
    drafts_.at(row)[part] = std::move(draft);
}

// How deep stepwise parts go, beside what those that came before them have proposed.
void ComposedDrafter::Slots::weigh() {
    weighed_ = true;
    std::vector<Draft> offers;
    std::vector<Policy::Found> found;
    Policy* policy = nullptr;
    offers.reserve(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
        const Asked& row = rows_[i];
        if (!row.policy || row.drawn || !row.adaptive) continue;
        std::vector<Draft> drafts = drafts_[i];
        for (Draft& draft : drafts) draft.assume();
        offers.push_back(merge(drafts, row.size));
        policy = row.policy, found.push_back({row.place, row.row, &offers.back(), i});
    }
    if (!policy) return;
    policy->plan_beside(found);
    for (const Policy::Found& each : found)
        rows_[each.at].levels = policy->levels(each.place), rows_[each.at].floor = policy->floor(each.place);
}

// What parts that draw are left: under rejection all but what the others, which share half of the nodes, have taken.
void ComposedDrafter::Slots::settle() {
    settled_ = true;
    for (size_t i = 0; i < rows_.size(); ++i) {
        const Asked& row = rows_[i];
        std::vector<Draft> certain;
        for (size_t j = 0; j < drafts_[i].size(); ++j)
            if (!composed_.parts_[j].draws) certain.push_back(drafts_[i][j]), certain.back().assume();
        certain_.push_back(merge(certain, row.drawn ? row.size / 2 : row.size));
        left_.push_back(row.drawn ? row.size - static_cast<int>(certain_.back().size()) : row.size);
    }
}

std::vector<Draft> ComposedDrafter::Slots::merged() {
    if (!settled_) settle();
    std::vector<Draft> trees = certain_;
    for (size_t i = 0; i < rows_.size(); ++i) {
        std::vector<Draft> drawn;
        for (const size_t j : composed_.order_)
            if (composed_.parts_[j].draws && !drafts_[i][j].empty()) drawn.push_back(drafts_[i][j]);
        if (!drawn.empty() && rows_[i].drawn) {  // each sampled node is a trial of its own, tried first; nothing is merged
            drawn.push_back(std::move(trees[i]));
            trees[i] = side_by_side(drawn);
        } else if (!drawn.empty()) {
            for (Draft& draft : drawn) draft.assume();
            drawn.insert(drawn.begin(), std::move(trees[i]));
            trees[i] = merge(drawn, rows_[i].size);
        }
        trees[i].levels = composed_.stepwise_ ? depths_[i] : -1;
    }
    return trees;
}

void ComposedDrafter::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    Slots slots(*this, rows);
    std::vector<size_t> at;
    for (const size_t j : order_) {
        const std::vector<Asked> asked = slots.wanted(j, at);
        slots.ask(j, asked, at);
    }
    trees = slots.merged();
}

bool ComposedDrafter::observe(const std::vector<Final>& rows, const States& states) {
    bool behind = false;
    for (const Part& part : parts_)
        if (part.drafter && !part.drafter->hidden_layers().empty()) behind = part.drafter->observe(rows, states) || behind;
    return behind;
}

void ComposedDrafter::read_ahead() {
    for (const Part& part : parts_)
        if (part.drafter) part.drafter->read_ahead();
}

int ComposedDrafter::ranks() const {
    int most = 0;
    for (const Part& part : parts_)
        if (part.drafter) most = std::max(most, part.drafter->ranks());
    return most;
}

void ComposedDrafter::rank(int64_t row, const int32_t* tokens, size_t n, const int32_t* ids) {
    const auto most = static_cast<size_t>(ranks());
    std::vector<int32_t> best;
    for (const Part& part : parts_) {
        const auto k = static_cast<size_t>(part.drafter ? part.drafter->ranks() : 0);
        best.clear();
        for (size_t i = 0; i < n; ++i) best.insert(best.end(), ids + i * most, ids + i * most + k);
        if (k) part.drafter->rank(row, tokens, n, best.data());
    }
}

}  // namespace outpace
