#include "sampling/ranking.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace outpace {

Ranking::Ranking(std::vector<int32_t> tokens, int outputs, int vocab, int threads)
    : tokens_(std::move(tokens)), stretches_((outputs + kStretch - 1) / kStretch), lists_(static_cast<size_t>(threads)) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("this is no learned drafter: " + what); };
    if (static_cast<int>(tokens_.size()) != outputs) wrong("it does not name a token for each row of its head");
    for (size_t i = 0; i < tokens_.size(); ++i)
        if (tokens_[i] < 0 || tokens_[i] >= vocab || (i > 0 && tokens_[i] <= tokens_[i - 1]))
            wrong("its tokens must ascend within the target's vocabulary");
}

void Ranking::begin(std::vector<Row> rows) {
    rows_ = std::move(rows);
    masses_.resize(rows_.size() * static_cast<size_t>(stretches_));
    for (std::vector<Shortlist>& lists : lists_) {
        if (lists.size() < rows_.size()) lists.resize(rows_.size());
        for (size_t i = 0; i < rows_.size(); ++i) lists[i].begin(rows_[i].listed());
    }
}

std::vector<RankedToken> Ranking::best(int row, const float* logits, const Kernels& kernels) const {
    const size_t i = static_cast<size_t>(row);
    const Mass all = whole(masses_.data() + i * static_cast<size_t>(stretches_), stretches_);
    if (std::isnan(all.top)) throw NotFinite();
    const Sampling& sampling = rows_[i].sampling;
    Shortlist merged;
    merged.begin(rows_[i].listed());
    if (logits && sampling.filters())  // as drafters/learned/picks.py chooses
        for (const int32_t place : survivors(logits, static_cast<int>(tokens_.size()), sampling, kernels))
            merged.insert(
                {static_cast<double>(logits[place]) / sampling.temperature + gumbel(sampling, tokens_[static_cast<size_t>(place)]),
                    logits[place], place});
    else
        for (const std::vector<Shortlist>& lists : lists_) merged.add(lists[i]);
    const std::vector<double> shares = merged.shares(all, sampling.temperature > 0.0);
    std::vector<RankedToken> found;
    for (size_t n = 0; n < std::min(shares.size(), static_cast<size_t>(rows_[i].most)); ++n) {
        const int32_t place = merged.entries()[n].place;
        found.push_back({place, tokens_[static_cast<size_t>(place)], shares[n]});
    }
    return found;
}

}  // namespace outpace
