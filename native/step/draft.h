// What is drafted for the rows of a step, and what becomes of it.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "drafting/draft.h"

namespace outpace {

// The drafts of B rows side by side, [B][width], as Drafts of exact/drafts.py has them.
struct Drafts {
    int width = 0;
    bool chains = true;
    std::vector<int32_t> widths, tokens, parents, levels;
    std::vector<float> confidence;
    std::vector<uint8_t> sources;

    // `draft_of(i)`: row i's.
    template <class Of>
    void fill(size_t rows, const Of& draft_of) {
        width = 0;
        chains = true;
        widths.assign(rows, 0);
        levels.assign(rows, -1);
        for (size_t i = 0; i < rows; ++i) {
            const Draft& draft = draft_of(i);
            widths[i] = static_cast<int32_t>(draft.tokens.size());
            levels[i] = draft.levels;
            width = std::max(width, static_cast<int>(widths[i]));
            chains = chains && draft.chain();
        }
        const size_t w = static_cast<size_t>(width), size = rows * w;
        tokens.assign(size, 0), parents.assign(size, -1), confidence.assign(size, 0.0f), sources.assign(size, 0);
        for (size_t i = 0; i < rows; ++i) {
            const Draft& draft = draft_of(i);
            for (size_t n = 0, at = i * w; n < draft.tokens.size(); ++n, ++at) {
                tokens[at] = draft.tokens[n];
                parents[at] = draft.parents[n];
                confidence[at] = static_cast<float>(draft.gains[n]);
                sources[at] = static_cast<uint8_t>(draft.sources[n]);
            }
        }
    }
};

// What a row gains: the tokens (the last one is the target's own), and the nodes that were accepted.
struct Verdict {
    std::vector<int32_t> tokens, path;
    bool decided() const { return !tokens.empty(); }
};

}  // namespace outpace
