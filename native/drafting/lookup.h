// The search of the drafter `ngram`; drafters/lookup/ngram.py has the reference.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace outpace {

struct Match {
    size_t next = 0;  // index of what follows it
    int length = 0;   // 0: there is none
};

// The newest of the longest earlier matches of the end of `tokens`, `least` to `most` tokens long.
inline Match newest_match(const int32_t* tokens, size_t n, int least, int most) {
    Match found;
    if (n == 0) return found;
    const size_t last = n - 1;
    const int longest = static_cast<int>(std::min<size_t>(static_cast<size_t>(std::max(most, 0)), last));
    for (size_t end = last; end-- > 0 && found.length < longest;) {
        if (tokens[end] != tokens[last]) continue;
        int length = 1;
        while (length < longest && static_cast<size_t>(length) <= end && tokens[end - length] == tokens[last - length]) ++length;
        if (length >= least && length > found.length) found = {end + 1, length};
    }
    return found;
}

// What followed the newest match: `size` tokens with their chances, or none. A match that runs into the end is a loop: its
// next turn is another one. `hit[l]`: how often the token after a match of l tokens was right.
struct Chain {
    std::vector<int32_t> tokens;
    std::vector<double> gains;
};

inline Chain newest_chain(const int32_t* tokens, size_t n, int least, int most, int size, const std::vector<double>& hit) {
    Chain chain;
    const Match found = newest_match(tokens, n, least, most);
    if (!found.length || hit.empty()) return chain;
    const size_t period = n - found.next;
    double gain = 1.0;
    for (int i = 0; i < size; ++i) {
        gain *= hit[std::min(static_cast<size_t>(found.length + i), hit.size() - 1)];
        chain.tokens.push_back(tokens[found.next + static_cast<size_t>(i) % period]);
        chain.gains.push_back(gain);
    }
    return chain;
}

}  // namespace outpace
