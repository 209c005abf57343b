// The search of the drafter `ngram`: earlier places that end like a sequence.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace outpace {

struct Match {
    size_t next;  // index of what follows it
    int length;
};

// At most `count` matches of the end of `tokens`, each of `least` to `most` tokens: longer before shorter, newer before older.
inline std::vector<Match> matches(const int32_t* tokens, size_t n, int least, int most, size_t count) {
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

}  // namespace outpace
