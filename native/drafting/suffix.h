// The index and the best-first tree of the drafter `suffix`; drafters/lookup/suffix_index.py is the reference, number for number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "drafting/votes.h"

namespace outpace {

// What the reference's module constants say; see there.
struct SuffixRules {
    int nearest;
    int few;
    VoteRules votes;
};

class SuffixIndex {
public:
    // Throws std::invalid_argument.
    SuffixIndex(int64_t capacity, int most, SuffixRules rules);

    void append(const int32_t* tokens, size_t n);
    void shrink(int64_t n);
    TokenTree propose(const int32_t* context, size_t n, int budget, const std::vector<const SuffixIndex*>& others,
                      bool wide) const;
    const std::vector<int32_t>& tokens() const { return held_; }

    struct Place {
        const SuffixIndex* index;
        int64_t at;  // where what follows stands
        int length;  // of the match
    };
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

}  // namespace outpace
