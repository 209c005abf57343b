// The target's likeliest tokens after tokens that a forward has run, for drafters that keep them.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "drafting/drafter.h"
#include "model/model.h"
#include "runtime/denormals.h"

namespace outpace {

// The `count` likeliest of logits [n], best first, ties to the lower id; -1 where there are fewer, or where one is NaN.
inline void likeliest(const float* logits, int n, int count, const Kernels& kernels, int32_t* ids) {
    constexpr int kStretch = 512;
    std::fill(ids, ids + count, -1);
    // The count-th largest of the stretches' maxima bounds the count-th largest logit from below.
    std::vector<float> peaks;
    for (int first = 0; first < n; first += kStretch) {
        const Best best = kernels.argmax(logits + first, std::min(kStretch, n - first));
        if (best.nan) return;
        peaks.push_back(best.value);
    }
    float bound = -INFINITY;
    if (static_cast<int>(peaks.size()) >= count) {
        std::nth_element(peaks.begin(), peaks.begin() + (count - 1), peaks.end(), std::greater<float>());
        bound = peaks[static_cast<size_t>(count - 1)];
    }
    static thread_local std::vector<int32_t> found;
    found.resize(static_cast<size_t>(n));
    const int hits = kernels.at_least(logits, 0, n, bound, found.data());
    const auto last = found.begin() + std::min(count, hits);
    std::partial_sort(found.begin(), last, found.begin() + hits,
        [logits](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    std::copy(found.begin(), last, ids);
}

// A row's drafter gets the likeliest tokens after packed tokens [first, end), whose logits were wanted.
inline void rank_row(NativeDrafter& drafter, int64_t row, const Result& result, const std::vector<int32_t>& token, int first, int end) {
    const int ranks = drafter.ranks(), n = end - first;
    if (!ranks) return;
    const DenormalsAsZero mode;
    std::vector<int32_t> ids(static_cast<size_t>(n * ranks));
    for (int i = 0; i < n; ++i)
        likeliest(
            result.logits(result.find(first + i)), result.vocab, ranks, *result.kernels, ids.data() + static_cast<ptrdiff_t>(i) * ranks);
    drafter.rank(row, token.data() + first, static_cast<size_t>(n), ids.data());
}

}  // namespace outpace
