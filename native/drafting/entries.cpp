#include "drafting/entries.h"

#include <algorithm>

namespace outpace {

void Entries::has_read(Row& row, int n) const {
    if (n <= 0) return;
    const size_t count = static_cast<size_t>(n);
    for (size_t i = 0; i < count; ++i) {
        const int entry = row.at[i];
        if (!row.spans.empty() && row.spans.back().second == entry)
            ++row.spans.back().second;
        else
            row.spans.emplace_back(entry, entry + 1);
    }
    row.last = row.at[count - 1];
    row.last_token = row.tokens[count - 1];
    const auto end = row.states.begin() + static_cast<std::ptrdiff_t>(count * wide_);
    row.last_states.assign(end - static_cast<std::ptrdiff_t>(wide_), end);
    row.at.erase(row.at.begin(), row.at.begin() + n);
    row.tokens.erase(row.tokens.begin(), row.tokens.begin() + n);
    row.states.erase(row.states.begin(), end);
}

bool Entries::unread_last(Row& row) const {
    if (row.last < 0 || row.spans.empty() || row.spans.back().second != row.last + 1) return false;
    if (--row.spans.back().second == row.spans.back().first) row.spans.pop_back();
    row.at.insert(row.at.begin(), row.last);
    row.tokens.insert(row.tokens.begin(), row.last_token);
    row.states.insert(row.states.begin(), row.last_states.begin(), row.last_states.end());
    return true;
}

void Entries::fork(int64_t src, int64_t dst, int known) {
    const Row& from = rows_.at(src);
    Row made;
    for (const auto& [first, end] : from.spans)
        if (first < known) made.spans.emplace_back(first, std::min(end, known));
    const auto n = std::lower_bound(from.at.begin(), from.at.end(), known) - from.at.begin();
    made.at.assign(from.at.begin(), from.at.begin() + n);
    made.tokens.assign(from.tokens.begin(), from.tokens.begin() + n);
    made.states.assign(from.states.begin(), from.states.begin() + n * static_cast<std::ptrdiff_t>(wide_));
    made.last = from.last;
    made.last_token = from.last_token;
    made.last_states = from.last_states;
    rows_[dst] = std::move(made);
}

void Entries::retire(int64_t row) {
    if (Row* its = find(row)) its->last = -1, its->last_states.clear();
}

}  // namespace outpace
