#include "drafting/lookups.h"

#include <algorithm>
#include <stdexcept>

#include "runtime/mapped.h"

namespace outpace {
namespace {

// The last tokens of a row, at most so many.
std::pair<const int32_t*, size_t> context_of(const Asked& asked, size_t most) {
    const size_t n = std::min(asked.n, most);
    return {asked.tokens + (asked.n - n), n};
}

struct Match {
    size_t next;  // index of what follows it
    int length;
};

// At most `count` matches of the end of `tokens`, each of `least` to `most` tokens: longer before shorter, newer before older.
std::vector<Match> matches(const int32_t* tokens, size_t n, int least, int most, size_t count) {
    std::vector<Match> found;
    if (n == 0) return found;
    const size_t last = n - 1;
    const int longest = static_cast<int>(std::min<size_t>(static_cast<size_t>(std::max(most, 0)), last));
    for (size_t end = last; end-- > 0 && !(found.size() == count && found.back().length == longest);) {
        if (tokens[end] != tokens[last]) continue;
        int length = 1;
        while (length < longest && static_cast<size_t>(length) <= end && tokens[end - length] == tokens[last - length]) ++length;
        if (length < least || (found.size() == count && found.back().length >= length)) continue;
        const auto shorter = std::find_if(found.begin(), found.end(), [length](const Match& match) { return match.length < length; });
        found.insert(shorter, {end + 1, length});
        if (found.size() > count) found.pop_back();
    }
    return found;
}

}  // namespace

NgramLookup::NgramLookup(int least, int most, int candidates, std::vector<double> hit, double older)
    : least_(least), most_(most), candidates_(static_cast<size_t>(candidates)), hit_(std::move(hit)), older_(older) {
    if (candidates < 1 || hit_.empty()) throw std::invalid_argument("candidates must be at least 1 and hit not empty");
}

void NgramLookup::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.clear();
    for (const Asked& asked : rows) {
        std::vector<Draft> chains;
        double left = 1.0;
        for (const Match& match : matches(asked.tokens, asked.n, least_, most_, candidates_)) {
            const size_t period = asked.n - match.next;  // a match that runs into the end is a loop: its next turn is another one
            Draft chain;
            double gain = left;
            for (int i = 0; i < asked.size; ++i) {
                gain *= hit_[std::min(static_cast<size_t>(match.length + i), hit_.size() - 1)];
                chain.add(asked.tokens[match.next + static_cast<size_t>(i) % period], i - 1, gain);
            }
            chains.push_back(std::move(chain));
            left *= older_;
        }
        trees.push_back(chains.empty() ? Draft() : chains.size() == 1 ? std::move(chains[0]) : merge(chains, asked.size));
    }
}

SuffixRows::SuffixRows(int64_t capacity, int most, SuffixRules rules, bool wide, SuffixIndex* history)
    : capacity_(capacity), most_(most), rules_(std::move(rules)), wide_(wide), history_(history) {
    SuffixIndex(capacity_, most_, rules_);  // refuses what no row could have
}

Draft SuffixRows::tree(const Asked& asked) {
    auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& its) { return its.row == asked.row; });
    if (row == rows_.end() || row->request != asked.request) {
        Row fresh{asked.row, asked.request, asked.prompt, std::make_unique<SuffixIndex>(capacity_, most_, rules_)};
        row = row == rows_.end() ? rows_.insert(row, std::move(fresh)) : (*row = std::move(fresh), row);
    }
    if (row->known < asked.n) {  // while a row is not asked to draft, it costs nothing
        row->index->append(asked.tokens + row->known, asked.n - row->known);
        row->known = asked.n;
    }
    std::vector<const SuffixIndex*> others;
    if (history_ && !history_->tokens().empty()) others.push_back(history_);
    const auto [context, n] = context_of(asked, static_cast<size_t>(most_));
    return row->index->propose(context, n, asked.size, others, wide_);
}

void SuffixRows::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.clear();
    for (const Asked& asked : rows) trees.push_back(tree(asked));
    bound();
}

int64_t SuffixRows::places() const {
    size_t sum = history_ ? history_->tokens().size() : 0;
    for (const Row& row : rows_) sum += row.index->tokens().size();
    return static_cast<int64_t>(sum);
}

void SuffixRows::bound() {
    while (places() > capacity_) {
        SuffixIndex* index = history_;
        if (!index || index->tokens().empty())
            index = std::max_element(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) {
                return a.index->tokens().size() < b.index->tokens().size();
            })->index.get();
        index->shrink(static_cast<int64_t>(index->tokens().size() / 2));
    }
}

int64_t SuffixRows::release(int64_t row) {
    const auto gone = std::find_if(rows_.begin(), rows_.end(), [&](const Row& its) { return its.row == row; });
    if (gone == rows_.end()) return -1;
    const int64_t prompt = gone->prompt;
    rows_.erase(gone);
    return prompt;
}

void RetrievalLookup::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.clear();
    Mapped::guard();
    for (const Asked& asked : rows) {
        const auto [context, n] = context_of(asked, Datastore::kDepth);
        trees.push_back(store_.propose(context, n, places_, least_, asked.size));
    }
}

ComposedDrafter::ComposedDrafter(std::vector<Part> parts, double sure, int deep) : parts_(std::move(parts)), sure_(sure), deep_(deep) {
    for (const Part& part : parts_) {
        if (stepwise_ && part.drafter->stepwise()) throw std::invalid_argument("only one part may take forwards of its own");
        stepwise_ = stepwise_ || part.drafter->stepwise();
        layers_.insert(layers_.end(), part.drafter->hidden_layers().begin(), part.drafter->hidden_layers().end());
    }
    std::sort(layers_.begin(), layers_.end());
    layers_.erase(std::unique(layers_.begin(), layers_.end()), layers_.end());
}

// What a part proposes for rows that are not spared.
void ComposedDrafter::ask(size_t part, const std::vector<Asked>& rows, const std::vector<char>& spared, Found& found) {
    std::vector<Asked> asked;
    std::vector<size_t> at;
    for (size_t i = 0; i < rows.size(); ++i) {
        const bool before = std::any_of(
            found[i].begin(), found[i].begin() + static_cast<std::ptrdiff_t>(part), [](const Draft& tree) { return !tree.tokens.empty(); });
        if (spared[i] || (parts_[part].fallback && before)) continue;
        asked.push_back(rows[i]);
        at.push_back(i);
    }
    if (asked.empty()) return;
    std::vector<Draft> its;
    parts_[part].drafter->propose(asked, its);
    for (size_t i = 0; i < at.size(); ++i) {
        std::fill(its[i].sources.begin(), its[i].sources.end(), static_cast<int>(part));
        its[i].assume();
        found[at[i]][part] = std::move(its[i]);
    }
}

bool ComposedDrafter::is_sure(const Draft& tree, int levels) const {
    if (levels <= 0) return false;
    const std::vector<int> depths = tree.depths();
    for (size_t n = 0; n < depths.size(); ++n)
        if (tree.gains[n] >= sure_ && depths[n] >= std::min(levels, deep_)) return true;
    return false;
}

void ComposedDrafter::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    Found found(rows.size(), std::vector<Draft>(parts_.size()));
    std::vector<char> spared(rows.size());
    for (size_t j = 0; j < parts_.size(); ++j)
        if (!parts_[j].drafter->stepwise()) ask(j, rows, spared, found);
    trees.clear();
    for (size_t i = 0; i < rows.size(); ++i) trees.push_back(merge(found[i], rows[i].size));
    if (!stepwise_) return;
    for (size_t i = 0; i < rows.size(); ++i) spared[i] = rows[i].adaptive && is_sure(trees[i], rows[i].levels);
    for (size_t j = 0; j < parts_.size(); ++j) {
        if (!parts_[j].drafter->stepwise()) continue;
        ask(j, rows, spared, found);
        for (size_t i = 0; i < rows.size(); ++i) {
            const int levels = std::max(found[i][j].levels, 0);
            if (!found[i][j].tokens.empty()) trees[i] = merge({std::move(trees[i]), std::move(found[i][j])}, rows[i].size);
            trees[i].levels = levels;
        }
    }
}

bool ComposedDrafter::observe(const std::vector<Final>& rows, const States& states) {
    bool behind = false;
    for (const Part& part : parts_)
        if (!part.drafter->hidden_layers().empty()) behind = part.drafter->observe(rows, states) || behind;
    return behind;
}

void ComposedDrafter::read_ahead() {
    for (const Part& part : parts_) part.drafter->read_ahead();
}

int ComposedDrafter::ranks() const {
    int most = 0;
    for (const Part& part : parts_) most = std::max(most, part.drafter->ranks());
    return most;
}

void ComposedDrafter::rank(int64_t row, const int32_t* tokens, size_t n, const int32_t* ids) {
    const auto most = static_cast<size_t>(ranks());
    std::vector<int32_t> best;
    for (const Part& part : parts_) {
        const auto k = static_cast<size_t>(part.drafter->ranks());
        best.clear();
        for (size_t i = 0; i < n; ++i) best.insert(best.end(), ids + i * most, ids + i * most + k);
        if (k) part.drafter->rank(row, tokens, n, best.data());
    }
}

}  // namespace outpace
