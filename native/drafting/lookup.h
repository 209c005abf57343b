// The search of the drafter `ngram`; drafters/lookup/ngram.py has the reference.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

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

}  // namespace outpace
