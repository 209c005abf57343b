#include "sampling/ranking.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "kernels/functions.h"

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
    if (logits && rows_[i].sampling.filters()) return filtered(rows_[i], logits, kernels);
    Shortlist merged;
    merged.begin(rows_[i].listed());
    for (const std::vector<Shortlist>& lists : lists_) merged.add(lists[i]);
    const std::vector<double> shares = merged.shares(all, rows_[i].sampling.temperature > 0.0);
    std::vector<RankedToken> found;
    for (size_t n = 0; n < std::min(shares.size(), static_cast<size_t>(rows_[i].most)); ++n) {
        const int32_t place = merged.entries()[n].place;
        found.push_back({place, tokens_[static_cast<size_t>(place)], shares[n]});
    }
    return found;
}

// By logit / temperature + noise among what the filters leave, as drafters/learned/picks.py chooses.
std::vector<RankedToken> Ranking::filtered(const Row& row, const float* logits, const Kernels& kernels) const {
    std::vector<RankedToken> found;
    for (const int32_t place : survivors(logits, static_cast<int>(tokens_.size()), row.sampling, kernels)) {
        const int32_t token = tokens_[static_cast<size_t>(place)];
        const double scaled = static_cast<double>(logits[place]) / row.sampling.temperature;
        found.push_back({place, token, scaled + gumbel(row.sampling, token)});
    }
    const size_t listed = std::min(found.size(), static_cast<size_t>(row.listed()));
    std::partial_sort(
        found.begin(), found.begin() + static_cast<std::ptrdiff_t>(listed), found.end(), [](const RankedToken& a, const RankedToken& b) {
        return a.share > b.share || (a.share == b.share && a.place < b.place);  // scores, as yet
    });
    found.resize(listed);
    const double top = found.empty() ? 0.0 : found.front().share;
    double total = 0.0;
    for (const RankedToken& one : found) total += exponential(one.share - top);
    for (RankedToken& one : found) one.share = exponential(one.share - top) / total;
    found.resize(std::min(listed, static_cast<size_t>(row.most)));
    return found;
}

}  // namespace outpace
