#include "step/step.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>

#include "model/ranks.h"

namespace outpace {

void Step::begin(Model* model, Policy* policy) {
    model_ = model, policy_ = policy;
    planned_ = levelled_ = false;
    rows.clear(), chunks.clear();
    open_.clear(), failed_.clear(), lost_.clear();
    result_.reset();
    seconds_.fill(0.0);
    threads_ = 0;
    stage_ = Stage::kPlan;
}

bool Step::computes() const {
    if (stage_ == Stage::kPropose)
        return std::any_of(rows.begin(), rows.end(),
            [](const RowNow& now) { return now.asked && now.levels && now.fixed->natively && now.fixed->drafter->stepwise(); });
    return model_ && stage_ >= Stage::kForward;
}

bool Step::advance() {
    static constexpr bool (Step::* kStages[])() = {
        &Step::plan, &Step::propose, &Step::edit, &Step::trim, &Step::forward, &Step::verify, &Step::settle};
    static constexpr size_t kPhases[] = {0, 0, 0, 0, 1, 2, 2};
    const auto begun = Clock::now();
    const auto now = static_cast<size_t>(stage_);
    open_.clear();
    stage_ = static_cast<Stage>(now + 1);
    const bool whole = (this->*kStages[now])();
    seconds_[kPhases[now]] += std::chrono::duration<double>(Clock::now() - begun).count();
    return whole;
}

// -- drafts -----------------------------------------------------------------------------------------------------------

bool Step::plan() {
    for (RowNow& now : rows) {
        if (!now.fixed->drafts) now.most = 0;
        planned_ = planned_ || now.fixed->drafts;
        now.asked = now.levels = now.most;
    }
    if (!policy()) return true;
    views_.clear();
    for (const RowNow& now : rows) {
        const StepRow& fixed = *now.fixed;
        if (!policy_->knows(fixed.row, fixed.kind.request)) policy_->admit(fixed.row, fixed.kind);
        views_.push_back({fixed.row, fixed.adaptive, now.most, static_cast<double>(now.length - 1)});
    }
    int64_t prefill = 0;
    for (const ChunkNow& chunk : chunks) prefill += static_cast<int64_t>(chunk.count());
    policy_->plan(views_, prefill);
    for (size_t i = 0; i < rows.size(); ++i)
        rows[i].asked = policy_->nodes(i), rows[i].levels = policy_->levels(i), rows[i].floor = policy_->floor(i);
    return true;
}

bool Step::propose() {
    std::vector<char> done(rows.size());
    std::vector<size_t> at;
    for (size_t first = 0; first < rows.size(); ++first) {
        RowNow& now = rows[first];
        if (!now.asked) now.proposed.levels = 0;
        if (done[first] || !now.asked) continue;
        if (!now.fixed->natively) {
            open_.push_back(static_cast<int>(first));
            continue;
        }
        at.clear();
        for (size_t i = first; i < rows.size(); ++i)
            if (rows[i].asked && rows[i].fixed->natively && rows[i].fixed->drafter == now.fixed->drafter) at.push_back(i), done[i] = 1;
        try {
            ask(*now.fixed->drafter, at);
        } catch (const MemoryLimit&) {  // nothing this time
            for (const size_t i : at) rows[i].proposed = {};
        } catch (const std::exception& error) {
            for (const size_t i : at) rows[i].proposed = {};
            failed_.push_back({{at.begin(), at.end()}, error.what()});
        }
    }
    return open_.empty() && failed_.empty();
}

void Step::ask(NativeDrafter& drafter, const std::vector<size_t>& at) {
    asked_.clear();
    const bool stepwise = drafter.stepwise();
    for (const size_t i : at) {
        const RowNow& now = rows[i];
        const StepRow& fixed = *now.fixed;
        // Under rejection no drafter reads the noise that chooses.
        const Sampling* sampling = fixed.kind.rejection ? nullptr : &fixed.sampling;
        asked_.push_back({fixed.row, fixed.kind.request, fixed.prompt, now.tokens, now.length, now.asked, stepwise ? now.levels : -1,
            fixed.adaptive, sampling, &now.chooser.edits, now.floor});
    }
    ++calls_[0];
    drafter.propose(asked_, found_);
    for (size_t j = 0; j < at.size(); ++j) {
        Draft& draft = found_[j];
        for (int& source : draft.sources) source = rows[at[j]].fixed->sources.at(static_cast<size_t>(source));
        draft.levels = stepwise ? std::max(draft.levels, 0) : -1;
        put(at[j], std::move(draft));
    }
}

void Step::put(size_t i, Draft draft) {
    RowNow& now = rows.at(i);
    const size_t k = draft.tokens.size();
    if (k > static_cast<size_t>(now.asked))
        throw std::invalid_argument("it proposed " + std::to_string(k) + " nodes where " + std::to_string(now.asked) + " were asked for");
    for (size_t n = 0; n < k; ++n) {
        if (draft.tokens[n] < 0 || draft.tokens[n] >= vocab_)
            throw std::invalid_argument("it proposed a token that is not in the vocabulary of " + std::to_string(vocab_));
        if (draft.parents[n] < -1 || draft.parents[n] >= static_cast<int32_t>(n))
            throw std::invalid_argument("it proposed a tree in which a node stands before its parent");
    }
    levelled_ = levelled_ || draft.levels >= 0;
    now.proposed = std::move(draft);
}

bool Step::edit() {
    for (size_t i = 0; i < rows.size(); ++i)
        if (rows[i].fixed->ruled && rows[i].most && !rows[i].drawn) open_.push_back(static_cast<int>(i));
    return open_.empty();
}

void Step::lead(size_t i, const std::vector<int32_t>& tokens, int source) {
    constexpr double kFirst = 0.99, kLast = 0.09;
    RowNow& now = rows.at(i);
    Draft chain, &own = now.proposed;
    for (const int32_t token : tokens) {
        const auto n = static_cast<double>(chain.size());
        chain.add(token, static_cast<int32_t>(chain.size()) - 1, kFirst - kLast * n / static_cast<double>(tokens.size()), source);
    }
    own.assume();
    const int levels = own.levels;
    now.proposed = merge({chain, own}, now.most);
    now.proposed.levels = levels;
}

void Step::keep(size_t i, const std::vector<int32_t>& nodes) {
    RowNow& now = rows.at(i);
    int32_t last = -1;
    for (const int32_t node : nodes) {
        if (node <= last || static_cast<size_t>(node) >= now.proposed.tokens.size())
            throw std::invalid_argument("nodes to keep must ascend, within the draft");
        last = node;
    }
    if (nodes.size() < now.proposed.tokens.size()) now.proposed = now.proposed.only(nodes);
}

bool Step::trim() {
    if (!policy()) return true;
    std::vector<const Draft*> drafts;
    bool drawn = false;
    for (const RowNow& now : rows) drafts.push_back(&now.proposed), drawn = drawn || now.drawn;
    policy_->trim(drafts, drawn);
    for (size_t i = 0; i < rows.size(); ++i) {
        const std::vector<int>& nodes = policy_->kept(i);
        if (nodes.size() == rows[i].proposed.tokens.size()) continue;
        rows[i].kept = rows[i].proposed.only(nodes);
        rows[i].trimmed = true;
    }
    return true;
}

// -- forward and verdicts ---------------------------------------------------------------------------------------------

void Step::pack() {
    size_t n = 0;
    for (const RowNow& now : rows) n += 1 + now.draft().tokens.size();
    for (const ChunkNow& chunk : chunks) n += chunk.count();
    token.resize(n), row.resize(n), position.resize(n), parent.resize(n);
    wanted.clear(), hidden_rows.clear();
    starts.assign(1, 0);
    size_t at = 0;
    const auto end = [&](const StepRow& fixed, bool asked) {
        for (int32_t i = starts.back(); asked && i < static_cast<int32_t>(at); ++i) wanted.push_back(i);
        starts.push_back(static_cast<int32_t>(at));
        hidden_rows.push_back(fixed.reads);
    };
    for (const RowNow& now : rows) {
        const Draft& draft = now.draft();
        const size_t first = at;
        token[at] = now.tokens[now.length - 1], row[at] = now.fixed->row, position[at] = static_cast<int32_t>(now.length) - 1,
        parent[at] = -1;
        ++at;
        for (size_t k = 0; k < draft.tokens.size(); ++k, ++at) {
            const int32_t above = draft.parents[k] + 1;
            token[at] = draft.tokens[k], row[at] = now.fixed->row, parent[at] = above;
            position[at] = position[first + static_cast<size_t>(above)] + 1;
        }
        end(*now.fixed, true);
    }
    for (const ChunkNow& chunk : chunks) {
        for (size_t k = 0; k < chunk.count(); ++k, ++at) {
            const auto place = static_cast<int32_t>(k);
            token[at] = chunk.tokens[k], row[at] = chunk.fixed->row, position[at] = chunk.first + place, parent[at] = place - 1;
        }
        end(*chunk.fixed, chunk.wanted);
    }
}

bool Step::forward() {
    pack();
    if (!model_) return false;
    const bool any = std::any_of(hidden_rows.begin(), hidden_rows.end(), [](uint8_t one) { return one; });
    const BatchView batch{static_cast<int>(token.size()), static_cast<int>(hidden_rows.size()), static_cast<int>(wanted.size()),
        token.data(), row.data(), position.data(), parent.data(), starts.data(), wanted.data(), any ? hidden_layers_ : std::vector<int>(),
        layers_, hidden_rows.data(), nullptr};
    {
        std::lock_guard<std::mutex> lock(model_->lock());
        ++calls_[1];
        result_ = model_->forward(batch);
    }
    threads_ = result_->threads;
    for (size_t i = 0; i < rows.size(); ++i)
        if (rows[i].fixed->drafter) rank_row(*rows[i].fixed->drafter, rows[i].fixed->row, *result_, token, starts[i], starts[i + 1]);
    return true;
}

bool Step::verify() {
    for (RowNow& now : rows) now.verdict = {};
    if (!model_) return false;
    int sampled = 0;
    for (RowNow& now : rows) {
        now.chooser.sampling = now.fixed->sampling;
        now.chooser.sampling.index = static_cast<uint32_t>(static_cast<int64_t>(now.length) - now.fixed->prompt);
        sampled += now.fixed->sampling.temperature != 0.0;
    }
    ++calls_[2];
    decide_all(result_->runtime.get(), static_cast<int>(rows.size()), sampled, [&](int i, Workspace& workspace) {
        RowNow& now = rows[static_cast<size_t>(i)];
        if (!now.fixed->coupled || now.rules == Rules::kForeign) return;
        const Draft& draft = now.draft();
        const size_t k = draft.tokens.size();
        std::vector<int32_t>&tokens = now.verdict.tokens, &path = now.verdict.path;
        tokens.assign(k + 1, 0), path.assign(k, 0);
        const bool greedy = now.fixed->sampling.temperature == 0.0 && now.chooser.edits.empty();
        const int accepted = walk(*result_, starts[static_cast<size_t>(i)], draft.tokens.data(), draft.parents.data(), static_cast<int>(k),
            greedy ? nullptr : &now.chooser, tokens.data(), path.data(), workspace);
        tokens.resize(static_cast<size_t>(accepted + 1)), path.resize(static_cast<size_t>(std::max(accepted, 0)));
    });
    reopen();
    return open_.empty();
}

void Step::reopen() {
    open_.clear();
    for (size_t i = 0; i < rows.size(); ++i)
        if (!rows[i].verdict.decided() || rows[i].rules >= Rules::kTested || rows[i].fixed->watched) open_.push_back(static_cast<int>(i));
}

void Step::decide(size_t i, Verdict verdict) {
    const Draft& draft = rows.at(i).draft();
    if (verdict.tokens.size() != verdict.path.size() + 1)
        throw std::invalid_argument("a verdict has one token more than its path has nodes");
    int32_t at = -1;
    for (const int32_t node : verdict.path) {
        if (node < 0 || static_cast<size_t>(node) >= draft.tokens.size() || draft.parents[static_cast<size_t>(node)] != at)
            throw std::invalid_argument("the path leaves the draft");
        at = node;
    }
    rows[i].verdict = std::move(verdict);
}

// The rows' cache becomes what their verdicts say: all but the last token.
bool Step::settle() {
    if (!model_) return false;
    std::lock_guard<std::mutex> lock(model_->lock());
    for (size_t i = 0; i < rows.size(); ++i) {
        const RowNow& now = rows[i];
        const Draft& draft = now.draft();
        const int before = static_cast<int>(now.length) - 1, gained = static_cast<int>(now.verdict.tokens.size());
        if (draft.tokens.empty()) continue;
        try {
            slots_.assign(1, 0);
            bool straight = true;  // the path is the beginning of what was written
            for (const int32_t node : now.verdict.path) {
                straight = straight && node + 1 == static_cast<int32_t>(slots_.size());
                slots_.push_back(node + 1);
            }
            if (!straight)
                model_->kv().compact(now.fixed->row, before, slots_.data(), gained);
            else if (gained <= static_cast<int>(draft.tokens.size()))
                model_->kv().truncate(now.fixed->row, before + gained);
        } catch (const std::exception& error) { lost_.emplace_back(static_cast<int>(i), error.what()); }
    }
    return true;
}

// -- what became final ------------------------------------------------------------------------------------------------

void Step::learn(double draft, double body) {
    if (!policy()) return;
    std::vector<const std::vector<int32_t>*> paths;
    for (const RowNow& now : rows) paths.push_back(&now.verdict.path);
    policy_->learn(paths, {draft, body});
}

std::vector<NativeDrafter*> Step::observe(const std::vector<std::pair<int, int>>& heard) {
    if (!result_) throw std::invalid_argument("the last step computed nothing here");
    std::map<NativeDrafter*, std::vector<Final>> finals;
    for (const auto& [at, count] : heard) {
        const auto i = static_cast<size_t>(at), b = rows.size();
        if (at < 0 || i >= b + chunks.size()) throw std::invalid_argument("no row of the last step");
        const StepRow& fixed = i < b ? *rows[i].fixed : *chunks[i - b].fixed;
        const size_t most = i < b ? rows[i].verdict.tokens.size() : chunks[i - b].count();
        if (!fixed.listens() || count < 1 || static_cast<size_t>(count) > most || (i >= b && static_cast<size_t>(count) < most))
            throw std::invalid_argument("no tokens that a row of the last step gained");
        finals[fixed.drafter].push_back(i < b ? gained(i, count) : written(i - b));
    }
    std::vector<NativeDrafter*> behind;
    for (const auto& [drafter, its] : finals)
        if (drafter->observe(its, {result_->hidden_states.get(), hidden_layers_})) behind.push_back(drafter);
    return behind;
}

// The first `count` tokens of row i's verdict.
Final Step::gained(size_t i, int count) const {
    const RowNow& now = rows[i];
    Final final{now.fixed->row, static_cast<int>(now.length) - 1, {}, {}};
    for (size_t n = 0; n < static_cast<size_t>(count); ++n) {
        const int32_t slot = n ? now.verdict.path[n - 1] + 1 : 0;
        final.tokens.push_back(now.verdict.tokens[n]);
        final.places.push_back(result_->hidden_place.at(static_cast<size_t>(starts[i] + slot)));
    }
    return final;
}

Final Step::written(size_t j) const {
    const ChunkNow& chunk = chunks[j];
    const auto from = result_->hidden_place.begin() + starts.at(rows.size() + j);
    return {chunk.fixed->row, chunk.first, {chunk.tokens.begin() + 1, chunk.tokens.end()},
        {from, from + static_cast<std::ptrdiff_t>(chunk.count())}};
}

}  // namespace outpace
