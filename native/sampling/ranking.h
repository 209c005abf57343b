// The best few tokens of several rows of logits over a draft vocabulary, found by threads that share the vocabulary.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "sampling/shortlist.h"

namespace outpace {

// The network's logits are NaN or infinite.
struct NotFinite : std::runtime_error {
    NotFinite() : std::runtime_error("the drafter's network produced NaN or infinite logits: check its weights") {}
};

struct RankedToken {
    int32_t place, token;  // in the draft vocabulary; the target's id
    double share;          // the chance that it is what the target chooses; see Shortlist::shares
};

// Products of a stretch of the head's rows with `n` encoded tokens: y [n][kStretch], kept within `cap` unless that is 0.
inline void stretch_product(
    const Kernels& kernels, const Matrix& head, const uint8_t* acts, int n, int stretch, float* y, float cap = 0.0f) {
    const int first = stretch * kStretch, begin = first / kRows, end = std::min(begin + kStretch / kRows, head.blocks);
    kernels.matmul(head, acts, n, begin, end, y - first, kStretch);
    for (int i = 0; i < n && cap > 0.0f; ++i) kernels.cap(y + i * kStretch, (end - begin) * kRows, cap);
}

class Ranking {
public:
    struct Row {
        Sampling sampling;
        int most;              // candidates
        int rivals = kRivals;  // scores among which noise leaves the choice open, at the least
        bool weighed = true;   // whether greedy shares are asked for

        int listed() const { return sampling.temperature > 0.0 ? std::max(most, rivals) : most; }
    };

    // `tokens`: the target's ids of the draft vocabulary. Throws std::invalid_argument where they do not ascend within `vocab`,
    // or are not as many as `outputs`.
    Ranking(std::vector<int32_t> tokens, int outputs, int vocab, int threads);

    const std::vector<int32_t>& tokens() const { return tokens_; }
    int stretches() const { return stretches_; }
    int begin_of(int stretch) const { return stretch * kStretch; }
    int size_of(int stretch) const { return std::min(kStretch, static_cast<int>(tokens_.size()) - begin_of(stretch)); }

    void begin(std::vector<Row> rows);
    // Logits of a stretch of row `row`: once each, by any thread.
    void consider(int thread, int row, int stretch, const float* logits, const Kernels& kernels) {
        const Row& of = rows_[static_cast<size_t>(row)];
        const int from = begin_of(stretch);
        masses_[static_cast<size_t>(row) * static_cast<size_t>(stretches_) + static_cast<size_t>(stretch)] =
            lists_[static_cast<size_t>(thread)][static_cast<size_t>(row)].consider(
                logits, from, size_of(stretch), tokens_.data() + from, of.sampling, kernels, of.weighed);
    }
    // The row's best, once all has been considered. Throws NotFinite. `logits` [outputs]: where the row's filters are to count,
    // if it has any; null: they are ignored.
    std::vector<RankedToken> best(int row, const float* logits, const Kernels& kernels) const;

private:
    std::vector<int32_t> tokens_;
    int stretches_;
    std::vector<Row> rows_;
    std::vector<std::vector<Shortlist>> lists_;  // [thread][row]
    std::vector<Mass> masses_;                   // [row][stretch]
};

}  // namespace outpace
