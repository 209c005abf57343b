#include "drafting/suffix.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace outpace {

namespace {

int64_t pair_of(int32_t first, int32_t second) { return static_cast<int64_t>(first) << 32 | static_cast<uint32_t>(second); }

}  // namespace

SuffixIndex::SuffixIndex(int64_t capacity, int most, SuffixRules rules) : capacity_(capacity), most_(most), rules_(std::move(rules)) {
    if (capacity < 2 || capacity > INT32_MAX || most < 2)
        throw std::invalid_argument(
            "capacity=" + std::to_string(capacity) + " must be 2 to 2147483647 and most=" + std::to_string(most) + " at least 2");
    if (rules_.votes.weights.empty() || rules_.nearest < 1 || rules_.few < 1)
        throw std::invalid_argument("weights must not be empty, nearest and few at least 1");
}

void SuffixIndex::push(Chain& chain, int32_t at, int most) {
    chain.push_back(at);
    const auto size = static_cast<int64_t>(chain.size());
    if (size > 2 * most) chain.erase(chain.begin(), chain.begin() + (size - most - 1));  // one to spare
}

void SuffixIndex::add(int32_t token, int32_t before) {
    held_.push_back(token);
    if (token == kEnd) return;
    const auto at = static_cast<int32_t>(held_.size());
    push(singles_[token], at, rules_.few);
    if (before != kEnd) push(pairs_[pair_of(before, token)], at, rules_.nearest);
}

void SuffixIndex::append(const int32_t* tokens, size_t n) {
    int32_t before = held_.empty() ? kEnd : held_.back();
    for (size_t i = 0; i < n; ++i) {
        if (static_cast<int64_t>(held_.size()) >= capacity_) shrink(capacity_ / 2);
        add(tokens[i], before);
        before = tokens[i];
    }
}

void SuffixIndex::shrink(int64_t n) {
    const auto keep = std::min<int64_t>(std::max<int64_t>(n, 0), static_cast<int64_t>(held_.size()));
    const std::vector<int32_t> kept(held_.end() - keep, held_.end());
    std::vector<int32_t>().swap(held_);
    decltype(pairs_)().swap(pairs_);
    decltype(singles_)().swap(singles_);
    int32_t before = kEnd;
    for (const int32_t token : kept) {
        add(token, before);
        before = token;
    }
}

void SuffixIndex::places(const int32_t* context, size_t count, std::vector<Place>& found) const {
    const auto n = std::min<int64_t>(static_cast<int64_t>(count), most_);
    if (n == 0) return;
    const int32_t* last = context + count - 1;
    const auto end = static_cast<int32_t>(held_.size());
    const size_t begin = found.size();
    // visit(at) for the newest places of a chain; the context's own end is none.
    const auto each = [end](const auto& chains, auto key, int most, const auto& visit) {
        const auto found = chains.find(key);
        if (found == chains.end()) return;
        const Chain& chain = found->second;
        for (auto i = chain.rbegin(); i != chain.rend() && i - chain.rbegin() < most; ++i)
            if (*i != end) visit(*i);
    };
    if (n > 1 && last[0] != kEnd && last[-1] != kEnd)
        each(pairs_, pair_of(last[-1], last[0]), rules_.nearest, [&](int32_t at) {
            int length = 2;
            const auto stop = std::min<int64_t>(n, at);
            while (length < stop && held_[static_cast<size_t>(at - 1 - length)] == *(last - length)) ++length;
            found.push_back({this, at, length});
        });
    const size_t stop = found.size();
    if (stop - begin >= static_cast<size_t>(rules_.few)) return;
    each(singles_, last[0], rules_.few, [&](int32_t at) {
        const auto same = [at](const Place& place) { return place.at == at; };
        const auto from = found.begin() + static_cast<int64_t>(begin), to = found.begin() + static_cast<int64_t>(stop);
        if (std::none_of(from, to, same)) found.push_back({this, at, 1});
    });
}

Draft SuffixIndex::propose(const int32_t* context, size_t n, int budget, const std::vector<const SuffixIndex*>& others, bool wide) const {
    std::vector<Place> arena;
    places(context, n, arena);
    for (const SuffixIndex* other : others) other->places(context, n, arena);
    const auto own_end = static_cast<int64_t>(held_.size());
    const auto next = [this, own_end](const Place& place, const std::vector<int32_t>& path) {
        const auto& held = place.index->held_;
        if (place.at < static_cast<int64_t>(held.size())) return held[static_cast<size_t>(place.at)];
        const int64_t drafted = place.at - own_end;  // a loop: its next turn is what was drafted
        return place.index == this && drafted < static_cast<int64_t>(path.size()) ? path[static_cast<size_t>(drafted)] : kEnd;
    };
    return grow(arena, rules_.votes, budget, wide, next);
}

SuffixRows::SuffixRows(int64_t capacity, int most, SuffixRules rules, bool wide, SuffixIndex* history)
    : capacity_(capacity), most_(most), rules_(std::move(rules)), wide_(wide), history_(history) {
    SuffixIndex(capacity_, most_, rules_);  // refuses what no row could have
}

Draft SuffixRows::tree(const Asked& asked) {
    auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& known) { return known.row == asked.row; });
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
    const size_t n = std::min(asked.n, static_cast<size_t>(most_));
    return row->index->propose(asked.tokens + (asked.n - n), n, asked.size, others, wide_);
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
    const auto gone = std::find_if(rows_.begin(), rows_.end(), [&](const Row& known) { return known.row == row; });
    if (gone == rows_.end()) return -1;
    const int64_t prompt = gone->prompt;
    rows_.erase(gone);
    return prompt;
}

}  // namespace outpace
