// The drafter `ngram`: what followed the last time the same few tokens appeared in the row. Stateless: a row's tokens are the index.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "drafting/drafter.h"
#include "drafting/merge.h"

namespace outpace {
namespace ngram {

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

}  // namespace ngram

class NgramLookup : public NativeDrafter {
public:
    // Matches of `least` to `most` tokens, at most `candidates` of them, as one tree. `hit[l]`: how often the token after a match
    // of l tokens was right (the last for all longer ones); `older`: the share of what newer matches leave that the next one gets.
    NgramLookup(int least, int most, int candidates, std::vector<double> hit, double older)
        : least_(least), most_(most), candidates_(static_cast<size_t>(candidates)), hit_(std::move(hit)), older_(older) {
        if (candidates < 1 || hit_.empty()) throw std::invalid_argument("candidates must be at least 1 and hit not empty");
    }
    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;

private:
    int least_, most_;
    size_t candidates_;
    std::vector<double> hit_;
    double older_;
};

inline void NgramLookup::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.clear();
    for (const Asked& asked : rows) {
        std::vector<Draft> chains;
        double left = 1.0;
        for (const ngram::Match& match : ngram::matches(asked.tokens, asked.n, least_, most_, candidates_)) {
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

}  // namespace outpace
