// Real entries of rows that a learned drafter's network has, and those that it has still to read;
// drafters/learned/entries.py is the reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace outpace {

// Entry i of a row has the target's hidden states of position i (`wide` numbers) and the token after it.
class Entries {
public:
    struct Row {
        std::vector<std::pair<int, int>> spans;  // that the network has, [first, end), ascending
        std::vector<int> at;                     // those that it lacks, ascending; their tokens, their states
        std::vector<int32_t> tokens;
        std::vector<float> states;
        int last = -1;  // the last one that it has, to be read again where nothing is unread; -1: it is not known
        int32_t last_token = 0;
        std::vector<float> last_states;

        int read() const {
            int sum = 0;
            for (const auto& [first, end] : spans) sum += end - first;
            return sum;
        }
        int end() const { return !at.empty() ? at.back() + 1 : spans.empty() ? 0 : spans.back().second; }
        int waiting() const { return static_cast<int>(at.size()); }
    };

    explicit Entries(int wide) : wide_(static_cast<size_t>(wide)) {}
    Entries(const Entries&) = delete;

    Row* find(int64_t row) {
        const auto found = rows_.find(row);
        return found == rows_.end() ? nullptr : &found->second;
    }
    // The row, made where it is not there.
    Row& at(int64_t row) { return rows_[row]; }
    // Makes room for an entry behind the row's last one: where its states go.
    float* append(Row& row, int entry, int32_t token) const {
        row.at.push_back(entry);
        row.tokens.push_back(token);
        row.states.resize(row.states.size() + wide_);
        return row.states.data() + row.states.size() - wide_;
    }
    // The network has the first n that were unread now.
    void has_read(Row& row, int n) const;
    // Makes the last entry unread again; whether that can be done.
    bool unread_last(Row& row) const;
    // `dst` becomes what `src` has of the entries before `known`.
    void fork(int64_t src, int64_t dst, int known);
    void retire(int64_t row);
    void release(int64_t row) { rows_.erase(row); }
    const std::map<int64_t, Row>& rows() const { return rows_; }
    size_t wide() const { return wide_; }

private:
    const size_t wide_;
    std::map<int64_t, Row> rows_;
};

}  // namespace outpace
