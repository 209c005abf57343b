#include "drafting/lookups.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "drafting/lookup.h"

namespace outpace {
namespace {

SourcedTree unsourced(TokenTree tree) {
    const size_t k = tree.tokens.size();
    return {std::move(tree.tokens), std::move(tree.parents), std::move(tree.gains), std::vector<int>(k, 0)};
}

// The last tokens of a row, at most so many.
std::pair<const int32_t*, size_t> context_of(const Asked& asked, size_t most) {
    const size_t n = std::min(asked.n, most);
    return {asked.tokens + (asked.n - n), n};
}

}  // namespace

void NgramLookup::propose(const std::vector<Asked>& rows, std::vector<SourcedTree>& trees) {
    trees.clear();
    for (const Asked& asked : rows) {
        Chain chain = newest_chain(asked.tokens, asked.n, least_, most_, asked.size, hit_);
        std::vector<int32_t> parents(chain.tokens.size());
        std::iota(parents.begin(), parents.end(), -1);
        trees.push_back(unsourced({std::move(chain.tokens), std::move(parents), std::move(chain.gains)}));
    }
}

SuffixRows::SuffixRows(int64_t capacity, int most, SuffixRules rules, bool wide, SuffixIndex* history)
    : capacity_(capacity), most_(most), rules_(std::move(rules)), wide_(wide), history_(history) {
    SuffixIndex(capacity_, most_, rules_);  // refuses what no row could have
}

TokenTree SuffixRows::tree(const Asked& asked) {
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

void SuffixRows::propose(const std::vector<Asked>& rows, std::vector<SourcedTree>& trees) {
    trees.clear();
    for (const Asked& asked : rows) trees.push_back(unsourced(tree(asked)));
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

void RetrievalLookup::propose(const std::vector<Asked>& rows, std::vector<SourcedTree>& trees) {
    trees.clear();
    for (const Asked& asked : rows) {
        const auto [context, n] = context_of(asked, Datastore::kDepth);
        trees.push_back(unsourced(store_.propose(context, n, places_, least_, asked.size)));
    }
}

void ComposedLookup::propose(const std::vector<Asked>& rows, std::vector<SourcedTree>& trees) {
    std::vector<std::vector<SourcedTree>> found(rows.size());  // by row, then part
    std::vector<SourcedTree> its;
    std::vector<Asked> asked;
    std::vector<size_t> at;
    for (size_t j = 0; j < parts_.size(); ++j) {
        asked.clear();
        at.clear();
        for (size_t i = 0; i < rows.size(); ++i) {
            const bool before = std::any_of(found[i].begin(), found[i].end(), [](const SourcedTree& tree) { return !tree.tokens.empty(); });
            found[i].emplace_back();
            if (parts_[j].fallback && before) continue;
            asked.push_back(rows[i]);
            at.push_back(i);
        }
        if (asked.empty()) continue;
        parts_[j].lookup->propose(asked, its);
        for (size_t i = 0; i < at.size(); ++i) {
            std::fill(its[i].sources.begin(), its[i].sources.end(), static_cast<int>(j));
            found[at[i]][j] = std::move(its[i]);
        }
    }
    trees.clear();
    for (size_t i = 0; i < rows.size(); ++i) trees.push_back(merge(found[i], rows[i].size));
}

}  // namespace outpace
