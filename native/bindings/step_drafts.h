// How the rows of a step in C++ are drafted for, and what the policy keeps of that: what engine/drafting.py does is the
// reference, value for value.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/policy.h"
#include "bindings/step_rows.h"

namespace outpace {

template <class Item, class Made>
nb::object filled(Made&& array, const std::vector<Item>& values) {
    std::copy(values.begin(), values.end(), array.data);
    return array.object;
}

// The rows of the step that is under way, or was the last one, and their drafts.
class StepDrafts {
public:
    void take(const nb::list& rows) {
        rows_.clear();
        planned_ = false;
        if (rows.size() == 0) throw std::invalid_argument("a step has at least one row");
        for (const nb::handle one : rows) {
            const nb::tuple given = nb::borrow<nb::tuple>(one);
            RowNow& now = rows_.emplace_back();
            now.its = &row_of(given);
            now.tokens.emplace(nb::handle(given[1]).ptr());
            const long length = whole(nb::handle(given[2]).ptr()), most = whole(nb::handle(given[3]).ptr());
            if (length < 1 || length > now.tokens->size() || most < 0) throw std::invalid_argument("a row's length or most is out of range");
            now.length = static_cast<size_t>(length);
            now.most = now.its->lookup ? static_cast<int>(most) : 0;
            now.asked = now.levels = now.most;
            now.pending = now.tokens->data()[length - 1];
            now.settled = false;
            planned_ = planned_ || now.its->lookup;
        }
    }

    static const StepRow& row_of(const nb::tuple& given) {
        if (!nb::isinstance<StepRow>(given[0])) throw nb::type_error("a row is (StepRow, tokens, length, most), a chunk (StepRow, tokens, start, count)");
        return *nb::inst_ptr<StepRow>(given[0]);
    }

    // engine/drafting.py: plan, propose, trim. `prefill`: tokens of chunks beside the rows.
    void draft(const nb::object& policy, int vocab, int64_t prefill) {
        held_ = policy;
        policy_ = policy.is_none() || !planned_ ? nullptr : nb::cast<BoundPolicy*>(policy);
        vocab_ = vocab;
        all_kept_ = true;
        names_ = nb::tuple();
        stepwise_ = false;
        if (!planned_) return proposed_.clear(rows_.size(), 0);
        if (policy_) {
            views_.clear();
            for (const RowNow& now : rows_) {
                const StepRow& its = *now.its;
                policy_->admit(its.row, its.request, its.sampling.temperature, its.drafter, its.levels, its.nodes);
                views_.push_back({its.row, its.adaptive, now.most, static_cast<double>(now.length - 1)});
            }
            policy_->policy().plan(views_, prefill);
            for (size_t i = 0; i < rows_.size(); ++i) {
                rows_[i].asked = policy_->policy().nodes(i);
                rows_[i].levels = policy_->policy().levels(i);
            }
        }
        propose();
        if (policy_) trim();
    }

    std::deque<RowNow>& rows() { return rows_; }
    const std::deque<RowNow>& rows() const { return rows_; }
    const Nodes& kept() const { return all_kept_ ? proposed_ : kept_; }
    BoundPolicy* policy() const { return policy_; }
    nb::handle name_of(size_t node) const { return PyTuple_GetItem(names_.ptr(), kept().sources[node]); }

    // As engine/native.py makes Drafts of them: before the policy, and after it (None: it kept all).
    nb::tuple before() const { return drafts(proposed_, true); }
    nb::object after() const { return all_kept_ ? nb::none() : nb::object(drafts(kept_, false)); }

private:
    void propose() {
        found_.assign(rows_.size(), {});
        std::vector<char> done(rows_.size());
        std::vector<nb::object> names;
        std::vector<std::vector<int>> number(rows_.size());  // of each row's sources among `names`
        int widest = 0;
        for (size_t first = 0; first < rows_.size(); ++first) {
            if (done[first] || !rows_[first].asked) continue;
            asked_.clear();
            at_.clear();
            for (size_t i = first; i < rows_.size(); ++i) {
                const RowNow& now = rows_[i];
                if (!now.asked || now.its->lookup != rows_[first].its->lookup) continue;
                const StepRow& its = *now.its;
                asked_.push_back({its.row, its.request, its.prompt, now.tokens->data(), now.length, now.asked,
                                  its.lookup->stepwise() ? now.levels : -1, its.adaptive, &its.sampling});
                at_.push_back(i);
                done[i] = 1;
            }
            ask(*rows_[first].its->lookup);
            std::vector<int> its;
            for (const nb::handle name : rows_[first].its->names) {
                size_t n = 0;
                while (n < names.size() && !names[n].equal(name)) ++n;
                if (n == names.size()) names.push_back(nb::borrow(name));
                its.push_back(static_cast<int>(n));
            }
            for (size_t i = 0; i < at_.size(); ++i) {
                found_[at_[i]] = std::move(trees_[i]);
                number[at_[i]] = its;
                widest = std::max(widest, static_cast<int>(found_[at_[i]].tokens.size()));
            }
        }
        nb::list all;
        for (const nb::object& name : names) all.append(name);
        names_ = nb::tuple(all);
        proposed_.clear(rows_.size(), widest);
        levels_.assign(rows_.size(), 0);
        for (size_t i = 0; i < rows_.size(); ++i) {
            const SourcedTree& tree = found_[i];
            const size_t k = tree.tokens.size(), to = proposed_.at(i);
            if (k > static_cast<size_t>(rows_[i].asked)) throw std::runtime_error("a lookup proposed more nodes than were asked for");
            proposed_.widths[i] = static_cast<int32_t>(k);
            levels_[i] = std::max(tree.levels, 0);
            for (size_t n = 0; n < k; ++n) {
                if (tree.tokens[n] < 0 || tree.tokens[n] >= vocab_)
                    throw std::runtime_error("a lookup proposed a token that is not in the vocabulary of " + std::to_string(vocab_));
                proposed_.tokens[to + n] = tree.tokens[n];
                proposed_.parents[to + n] = tree.parents[n];
                proposed_.chains = proposed_.chains && tree.parents[n] == static_cast<int32_t>(n) - 1;
                proposed_.gains[to + n] = static_cast<float>(tree.gains[n]);
                proposed_.sources[to + n] = static_cast<uint8_t>(number[i][static_cast<size_t>(tree.sources[n])]);
            }
        }
    }

    // What it proposes for `asked_`, in `trees_`. A network's forwards need no GIL.
    void ask(Lookup& lookup) {
        std::optional<nb::gil_scoped_release> release;
        if (lookup.stepwise()) {
            stepwise_ = true;
            if (std::any_of(asked_.begin(), asked_.end(), [](const Asked& its) { return its.levels != 0; })) release.emplace();
        }
        lookup.propose(asked_, trees_);
    }

    void trim() {
        const bool none = names_.size() == 0;  // nobody was asked
        const std::vector<int>& sources = policy_->numbers(names_);
        Policy& policy = policy_->policy();
        policy.trim({proposed_.widths.data(), proposed_.chains ? nullptr : proposed_.parents.data(), none ? nullptr : proposed_.gains.data(),
                     names_.size() > 1 ? proposed_.sources.data() : nullptr, static_cast<size_t>(proposed_.width), sources.data(), false,
                     stepwise_ ? levels_.data() : nullptr},
                    policy_->explain());
        size_t widest = 0;
        for (size_t i = 0; i < rows_.size(); ++i) {
            all_kept_ = all_kept_ && static_cast<int32_t>(policy.kept(i).size()) == proposed_.widths[i];
            widest = std::max(widest, policy.kept(i).size());
        }
        if (all_kept_) return;
        kept_.clear(rows_.size(), static_cast<int>(widest));
        kept_.chains = proposed_.chains;
        std::vector<int32_t> place(static_cast<size_t>(proposed_.width));
        for (size_t i = 0; i < rows_.size(); ++i) {
            const std::vector<int>& nodes = policy.kept(i);
            kept_.widths[i] = static_cast<int32_t>(nodes.size());
            for (size_t n = 0; n < nodes.size(); ++n) {
                const size_t old = proposed_.at(i) + static_cast<size_t>(nodes[n]), at = kept_.at(i) + n;
                place[static_cast<size_t>(nodes[n])] = static_cast<int32_t>(n);
                kept_.tokens[at] = proposed_.tokens[old];
                kept_.parents[at] = proposed_.parents[old] < 0 ? -1 : place[static_cast<size_t>(proposed_.parents[old])];
                kept_.sources[at] = proposed_.sources[old];
            }
        }
    }

    nb::tuple drafts(const Nodes& nodes, bool confident) const {
        const auto b = static_cast<Py_ssize_t>(rows_.size()), w = static_cast<Py_ssize_t>(nodes.width);
        nb::object parents = nb::none(), gains = nb::none(), source = nb::none(), levels = nb::none();
        if (!nodes.chains) parents = filled(IntArray({b, w}), nodes.parents);
        if (confident && names_.size()) gains = filled(Array<float>(Names::get().float32, {b, w}), nodes.gains);
        if (names_.size() > 1) source = filled(Array<uint8_t>(Names::get().uint8, {b, w}), nodes.sources);
        if (confident && stepwise_) levels = filled(IntArray({b}), levels_);
        return nb::make_tuple(filled(IntArray({b, w}), nodes.tokens), filled(IntArray({b}), nodes.widths), parents, nb::none(), gains, source, names_, levels);
    }

    nb::object held_;  // keeps the policy alive
    BoundPolicy* policy_ = nullptr;
    int vocab_ = 0;
    std::deque<RowNow> rows_;
    bool planned_ = false, all_kept_ = true;
    bool stepwise_ = false;  // somebody was asked who takes a forward for every level
    nb::tuple names_;        // of sources
    Nodes proposed_, kept_;
    std::vector<int32_t> levels_;  // forwards that rows had
    std::vector<Policy::View> views_;
    std::vector<Asked> asked_;
    std::vector<size_t> at_;
    std::vector<SourcedTree> trees_, found_;
};

}  // namespace outpace
