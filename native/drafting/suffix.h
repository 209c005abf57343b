// The index and the best-first tree of the drafter `suffix` (SuffixDecoding, arXiv 2411.04975, section 3). Positions are chained by
// the pair of tokens that ends there. A tree node is the set of earlier places that its path continues, and its children are
// what stands next in them: counts without a suffix tree. tests/oracles/suffix.py has it in plain Python, number for number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "drafting/drafter.h"
#include "drafting/votes.h"

namespace outpace {

struct SuffixRules {
    int nearest;  // newest places looked at for the last pair of tokens
    int few;      // with fewer than that, also so many newest places of the last token alone
    VoteRules votes;
};

// At most `capacity` tokens; when it is full, the older half is forgotten. `most`: tokens of a context that count.
class SuffixIndex {
public:
    // Throws std::invalid_argument.
    SuffixIndex(int64_t capacity, int most, SuffixRules rules);

    void append(const int32_t* tokens, size_t n);
    void shrink(int64_t n);  // forgets all but the newest n tokens
    Draft propose(const int32_t* context, size_t n, int budget, const std::vector<const SuffixIndex*>& others, bool wide) const;
    const std::vector<int32_t>& tokens() const { return held_; }

    struct Place {
        const SuffixIndex* index;
        int64_t at;  // where what follows stands
        int length;  // of the match
    };
    // Adds the places that end like the context, newest first; the context itself, which the index ends with, is none.
    void places(const int32_t* context, size_t n, std::vector<Place>& found) const;

private:
    using Chain = std::vector<int32_t>;

    void add(int32_t token, int32_t before);
    static void push(Chain& chain, int32_t at, int most);

    int64_t capacity_;
    int most_;
    SuffixRules rules_;
    std::vector<int32_t> held_;
    std::unordered_map<int64_t, Chain> pairs_;  // last two tokens -> where what follows them stands, oldest first
    std::unordered_map<int32_t, Chain> singles_;
};

// The indexes of rows that `suffix` drafts for, and its history.
class SuffixRows : public NativeDrafter {
public:
    // `history` may be null, and must outlive this. `most`: longest match. Throws std::invalid_argument.
    SuffixRows(int64_t capacity, int most, SuffixRules rules, bool wide, SuffixIndex* history);
    SuffixRows(const SuffixRows&) = delete;

    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    // Forget until everything fits: the history first, then the older half of the largest row.
    void bound();
    // The row is gone; tokens of its prompt, or -1 if it was unknown.
    int64_t release(int64_t row);
    int64_t places() const;

    struct Row {
        int64_t row, request, prompt;
        std::unique_ptr<SuffixIndex> index;
        size_t known = 0;  // committed tokens that the index has seen
    };
    const std::vector<Row>& rows() const { return rows_; }

private:
    Draft tree(const Asked& asked);  // one row's; `bound` has to follow

    int64_t capacity_;
    int most_;
    SuffixRules rules_;
    bool wide_;
    SuffixIndex* history_;
    std::vector<Row> rows_;  // in the order in which they came
};

}  // namespace outpace
