#include "step/rows.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>

#include "drafting/merge.h"
#include "model/ranks.h"

namespace outpace {

void Row::begin(const int32_t* committed, size_t count, int most_nodes) {
    tokens = committed, length = count, most = most_nodes;
    rules = Rules::kNone;
    chooser.edits.clear();
    drawn = trimmed = false;
    proposed = {}, kept = {}, verdict = {};
}

void Rows::clear() {
    for (Row* row : rows) row->tokens = nullptr;
    rows.clear(), chunks.clear();
    planned_ = limits_depth_ = packed_ = final_ = false;
    policy_ = nullptr;
    result_.reset();
}

Row& Rows::drafting(size_t i) {
    if (final_) throw std::invalid_argument("the step's drafts are packed or decided: they stay as they are");
    return *rows.at(i);
}

Policy& Rows::planned() const {
    if (policy_->planned() != rows.size())
        throw std::invalid_argument("the policy has planned another step since, or learnt from this one");
    return *policy_;
}

// -- drafts -----------------------------------------------------------------------------------------------------------

void Rows::plan(Policy* policy) {
    policy_ = policy;
    for (Row* row : rows) {
        if (!row->drafts) row->most = 0;
        planned_ = planned_ || row->drafts;
        row->nodes = row->depth = row->most;
        row->floor = 0.0;
    }
    if (!policy_) return;
    int64_t prefill = 0;
    bool reads = false;
    for (const PromptChunk& chunk : chunks) prefill += static_cast<int64_t>(chunk.count()), reads = reads || chunk.row->drafts;
    if (!planned_) {  // that time counts, and what drafters read beside it
        if (reads) policy_->plan({}, prefill + static_cast<int64_t>(rows.size()));
        return;
    }
    views_.clear();
    for (const Row* row : rows) {
        if (!policy_->knows(row->row, row->kind.request)) {
            policy_->admit(row->row, row->kind);
            if (row->kind.reads) policy_->has_read(row->row, static_cast<double>(row->start), static_cast<double>(row->read));
        }
        views_.push_back({row->row, row->adaptive, row->most, static_cast<double>(row->length - 1)});
    }
    policy_->plan(views_, prefill);
    for (size_t i = 0; i < rows.size(); ++i)
        rows[i]->nodes = policy_->nodes(i), rows[i]->depth = policy_->levels(i), rows[i]->floor = policy_->floor(i),
        rows[i]->start = policy_->start(i);
}

bool Rows::computes() const {
    return std::any_of(
        rows.begin(), rows.end(), [](const Row* row) { return row->nodes && row->depth && row->natively && row->drafter->stepwise(); });
}

std::vector<Rows::Failed> Rows::propose() {
    if (!rows.empty()) drafting(0);
    std::vector<Failed> failed;
    std::vector<char> done(rows.size());
    std::vector<size_t> at;
    for (size_t first = 0; first < rows.size(); ++first) {
        const Row& row = *rows[first];
        if (!row.nodes) rows[first]->proposed.levels = 0;
        if (done[first] || !row.nodes || !row.natively) continue;
        at.clear();
        for (size_t i = first; i < rows.size(); ++i)
            if (rows[i]->nodes && rows[i]->natively && rows[i]->drafter == row.drafter) at.push_back(i), done[i] = 1;
        try {
            ask(*row.drafter, at);
        } catch (const MemoryLimit&) {  // nothing this time
            for (const size_t i : at) rows[i]->proposed = {};
        } catch (const std::exception& error) {
            for (const size_t i : at) rows[i]->proposed = {};
            failed.push_back({{at.begin(), at.end()}, error.what()});
        }
    }
    return failed;
}

void Rows::ask(NativeDrafter& drafter, const std::vector<size_t>& at) {
    asked_.clear();
    const bool stepwise = drafter.stepwise();
    for (const size_t i : at) {
        const Row& each = *rows[i];
        // Under rejection no drafter reads the noise that chooses.
        const Sampling* sampling = each.kind.rejection ? nullptr : &each.sampling;
        asked_.push_back({each.row, each.kind.request, each.prompt, each.tokens, each.length, each.nodes, stepwise ? each.depth : -1,
            each.adaptive, sampling, &each.chooser.edits, each.floor, false, each.start, policy(), i, &each.sources});
    }
    drafter.propose(asked_, drafted_);
    for (size_t j = 0; j < at.size(); ++j) {
        Draft& draft = drafted_[j];
        for (int& source : draft.sources) source = rows[at[j]]->sources.at(static_cast<size_t>(source));
        draft.levels = stepwise ? std::max(draft.levels, 0) : -1;
        put(at[j], std::move(draft));
    }
}

void Rows::put(size_t i, Draft draft) {
    Row& each = drafting(i);
    const size_t k = draft.tokens.size();
    if (k > static_cast<size_t>(each.nodes))
        throw std::invalid_argument("it proposed " + std::to_string(k) + " nodes where " + std::to_string(each.nodes) + " were asked for");
    if (std::any_of(draft.tokens.begin(), draft.tokens.end(), [&](int32_t token) { return token < 0 || token >= vocab_; }))
        throw std::invalid_argument("it proposed a token that is not in the vocabulary of " + std::to_string(vocab_));
    if (!draft.parents_first()) throw std::invalid_argument("it proposed a tree in which a node stands before its parent");
    limits_depth_ = limits_depth_ || draft.levels >= 0;
    each.proposed = std::move(draft);
}

void Rows::lead(size_t i, const std::vector<int32_t>& tokens, int source) {
    constexpr double kFirst = 0.99, kLast = 0.09;
    Row& each = drafting(i);
    Draft chain, &own = each.proposed;
    for (const int32_t token : tokens) {
        if (token < 0 || token >= vocab_) throw std::invalid_argument("a token that must follow is not in the vocabulary");
        const auto n = static_cast<double>(chain.size());
        chain.add(token, static_cast<int32_t>(chain.size()) - 1, kFirst - kLast * n / static_cast<double>(tokens.size()), source);
    }
    own.assume();
    const int levels = own.levels;
    each.proposed = merge({chain, own}, each.most);
    each.proposed.levels = levels;
}

void Rows::keep(size_t i, const std::vector<int32_t>& nodes) {
    Row& each = drafting(i);
    std::vector<char> kept(each.proposed.tokens.size());
    int32_t last = -1;
    for (const int32_t node : nodes) {
        const bool ascends = node > last && static_cast<size_t>(node) < kept.size();
        const int32_t parent = ascends ? each.proposed.parents[static_cast<size_t>(node)] : -1;
        if (!ascends || (parent >= 0 && !kept[static_cast<size_t>(parent)]))
            throw std::invalid_argument("nodes to keep must ascend, within the draft, each with its parent");
        kept[static_cast<size_t>(last = node)] = 1;
    }
    if (nodes.size() < each.proposed.tokens.size()) each.proposed = each.proposed.only(nodes);
}

void Rows::trim() {
    if (!policy() || rows.empty()) return;
    std::vector<const Draft*> drafts;
    bool drawn = false;
    for (const Row* row : rows) drafts.push_back(&row->proposed), drawn = drawn || row->drawn;
    drafting(0);
    planned().trim(drafts, drawn);
    for (size_t i = 0; i < rows.size(); ++i) {
        const std::vector<int>& nodes = policy_->kept(i);
        rows[i]->trimmed = nodes.size() != rows[i]->proposed.tokens.size();
        if (rows[i]->trimmed) rows[i]->kept = rows[i]->proposed.only(nodes);
    }
}

// -- forward and verdicts ---------------------------------------------------------------------------------------------

void Rows::pack() {
    packed_ = final_ = true;
    size_t n = 0;
    for (const Row* each : rows) n += 1 + each->draft().tokens.size();
    for (const PromptChunk& chunk : chunks) n += chunk.count();
    token.resize(n), row.resize(n), position.resize(n), parent.resize(n);
    wanted.clear(), hidden_rows.clear();
    starts.assign(1, 0);
    size_t at = 0;
    const auto end = [&](const Row& each, bool asked) {
        for (int32_t i = starts.back(); asked && i < static_cast<int32_t>(at); ++i) wanted.push_back(i);
        starts.push_back(static_cast<int32_t>(at));
        hidden_rows.push_back(each.reads);
    };
    for (const Row* each : rows) {
        const Draft& draft = each->draft();
        const size_t first = at;
        token[at] = each->tokens[each->length - 1], row[at] = each->row, position[at] = static_cast<int32_t>(each->length) - 1;
        parent[at] = -1;
        ++at;
        for (size_t k = 0; k < draft.tokens.size(); ++k, ++at) {
            const int32_t above = draft.parents[k] + 1;
            token[at] = draft.tokens[k], row[at] = each->row, parent[at] = above;
            position[at] = position[first + static_cast<size_t>(above)] + 1;
        }
        end(*each, true);
    }
    for (const PromptChunk& chunk : chunks) {
        for (size_t k = 0; k < chunk.count(); ++k, ++at) {
            const auto place = static_cast<int32_t>(k);
            token[at] = chunk.tokens[k], row[at] = chunk.row->row, position[at] = chunk.first + place, parent[at] = place - 1;
        }
        end(*chunk.row, chunk.wanted);
    }
}

BatchView Rows::batch(int layers) const {
    const bool any = std::any_of(hidden_rows.begin(), hidden_rows.end(), [](uint8_t one) { return one; });
    return {static_cast<int>(token.size()), static_cast<int>(hidden_rows.size()), static_cast<int>(wanted.size()), token.data(), row.data(),
        position.data(), parent.data(), starts.data(), wanted.data(), any ? hidden_layers_ : std::vector<int>(), layers, hidden_rows.data(),
        nullptr};
}

void Rows::verify(std::shared_ptr<Result> result) {
    if (!packed_ || static_cast<size_t>(result->tokens) != token.size() || result->vocab != vocab_)
        throw std::invalid_argument("a result of another batch");
    result_ = std::move(result);
    int sampled = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
        Row& each = *rows[i];
        if (each.drafter) rank_row(*each.drafter, each.row, *result_, token, starts[i], starts[i + 1]);
        each.chooser.sampling = each.sampling;
        each.chooser.sampling.index = static_cast<uint32_t>(static_cast<int64_t>(each.length) - each.prompt);
        sampled += each.sampling.temperature != 0.0;
    }
    decide_all(result_->runtime.get(), static_cast<int>(rows.size()), sampled, [&](int i, Workspace& workspace) {
        Row& each = *rows[static_cast<size_t>(i)];
        if (!each.coupled || each.rules == Rules::kForeign) return;
        const Draft& draft = each.draft();
        const size_t k = draft.tokens.size();
        std::vector<int32_t>&tokens = each.verdict.tokens, &path = each.verdict.path;
        tokens.assign(k + 1, 0), path.assign(k, 0);
        const bool greedy = each.sampling.temperature == 0.0 && each.chooser.edits.empty();
        const int accepted = walk(*result_, starts[static_cast<size_t>(i)], draft.tokens.data(), draft.parents.data(), static_cast<int>(k),
            greedy ? nullptr : &each.chooser, tokens.data(), path.data(), workspace);
        tokens.resize(static_cast<size_t>(accepted + 1)), path.resize(static_cast<size_t>(std::max(accepted, 0)));
    });
}

void Rows::decide(size_t i, Verdict verdict) {
    const Draft& draft = rows.at(i)->draft();
    final_ = true;
    if (verdict.tokens.size() != verdict.path.size() + 1)
        throw std::invalid_argument("a verdict has one token more than its path has nodes");
    int32_t at = -1;
    for (const int32_t node : verdict.path) {
        if (node < 0 || static_cast<size_t>(node) >= draft.tokens.size() || draft.parents[static_cast<size_t>(node)] != at)
            throw std::invalid_argument("the path leaves the draft");
        at = node;
    }
    rows[i]->verdict = std::move(verdict);
}

bool Rows::path_of(size_t i, std::vector<int32_t>& slots) const {
    slots.assign(1, 0);
    bool straight = true;
    for (const int32_t node : rows[i]->verdict.path) {
        straight = straight && node + 1 == static_cast<int32_t>(slots.size());
        slots.push_back(node + 1);
    }
    return straight;
}

std::vector<std::pair<int, std::string>> Rows::settle(Model& model) const {
    std::vector<std::pair<int, std::string>> lost;
    std::vector<int32_t> slots;
    for (size_t i = 0; i < rows.size(); ++i) {
        const Row& each = *rows[i];
        const size_t drafted = each.draft().tokens.size();
        if (!drafted) continue;
        const int before = static_cast<int>(each.length) - 1;
        try {
            if (!path_of(i, slots))
                model.kv().compact(each.row, before, slots.data(), static_cast<int>(slots.size()));
            else if (slots.size() <= drafted)
                model.kv().truncate(each.row, before + static_cast<int>(slots.size()));
        } catch (const std::exception& error) { lost.emplace_back(static_cast<int>(i), error.what()); }
    }
    return lost;
}

// -- what became final ------------------------------------------------------------------------------------------------

void Rows::learn(double draft, double body, double experts) {
    if (!policy() || rows.empty()) return;
    Policy::Of paths, tokens;
    for (const Row* each : rows) paths.push_back(&each->verdict.path), tokens.push_back(&each->verdict.tokens);
    planned().learn(paths, tokens, {draft, body}, experts);
}

std::vector<NativeDrafter*> Rows::observe(const std::vector<std::pair<int, int>>& gains) {
    if (!result_) throw std::invalid_argument("the last step computed nothing here");
    std::map<NativeDrafter*, std::vector<Final>> finals;
    for (const auto& [at, count] : gains) {
        const auto i = static_cast<size_t>(at), b = rows.size();
        if (at < 0 || i >= b + chunks.size()) throw std::invalid_argument("no row of the last step");
        const Row& each = i < b ? *rows[i] : *chunks[i - b].row;
        const size_t most = i < b ? each.verdict.tokens.size() : chunks[i - b].count();
        if (!each.observes() || count < 1 || static_cast<size_t>(count) > most || (i >= b && static_cast<size_t>(count) < most))
            throw std::invalid_argument("no tokens that a row of the last step gained");
        finals[each.drafter].push_back(i < b ? gained(i, count) : written(i - b));
    }
    std::vector<NativeDrafter*> behind;
    for (const auto& [drafter, events] : finals)
        if (drafter->observe(events, {result_->hidden_states.get(), hidden_layers_})) behind.push_back(drafter);
    return behind;
}

// The first `count` tokens of row i's verdict.
Final Rows::gained(size_t i, int count) const {
    const Row& each = *rows[i];
    Final final{each.row, static_cast<int>(each.length) - 1, {}, {}};
    for (size_t n = 0; n < static_cast<size_t>(count); ++n) {
        const int32_t slot = n ? each.verdict.path[n - 1] + 1 : 0;
        final.tokens.push_back(each.verdict.tokens[n]);
        final.places.push_back(result_->hidden_place.at(static_cast<size_t>(starts[i] + slot)));
    }
    return final;
}

Final Rows::written(size_t j) const {
    const PromptChunk& chunk = chunks[j];
    const auto from = result_->hidden_place.begin() + starts.at(rows.size() + j);
    return {chunk.row->row, chunk.first, {chunk.tokens.begin() + 1, chunk.tokens.end()},
        {from, from + static_cast<std::ptrdiff_t>(chunk.count())}};
}

}  // namespace outpace
