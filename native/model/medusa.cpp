#include "model/medusa.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "model/run.h"
#include "runtime/denormals.h"

namespace outpace {

constexpr int kMedusaRivals = 8;  // scores among which a sampled token's chance is shared: RIVALS of drafters/learned/picks.py

Medusa::Medusa(std::shared_ptr<Model> target, std::vector<std::vector<Block>> heads, std::vector<Matrix> rows, std::vector<int32_t> tokens)
    : target_(std::move(target)),
      heads_(std::move(heads)),
      rows_(std::move(rows)),
      ranking_(tokens, static_cast<int>(tokens.size()), target_->vocab(), target_->threads()),
      x_(heads_.size()),
      acts_(heads_.size()),
      y_(heads_.size()) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("these are no Medusa heads: " + what); };
    const int hidden = target_->hidden();
    if (heads_.empty() || (rows_.size() != 1 && rows_.size() != heads_.size())) wrong("heads and output rows differ in number");
    for (const Matrix& matrix : rows_)
        if (matrix.rows != outputs() || matrix.cols != hidden)
            wrong("output rows are " + std::to_string(matrix.rows) + " x " + std::to_string(matrix.cols));
    for (const std::vector<Block>& blocks : heads_) {
        if (blocks.size() != heads_[0].size()) wrong("heads have different numbers of blocks");
        for (const Block& block : blocks)
            if (block.weight.rows != hidden || block.weight.cols != hidden ||
                (!block.bias.empty() && static_cast<int>(block.bias.size()) != hidden))
                wrong("a block is " + std::to_string(block.weight.rows) + " x " + std::to_string(block.weight.cols));
    }
}

// x_ of a head, encoded for what reads it.
void Medusa::encode(int head, const Matrix& reader, int count) {
    const size_t k = static_cast<size_t>(head);
    acts_[k].need(static_cast<size_t>(reader.groups) * kChunk * static_cast<size_t>(act_bytes(reader.acts())));
    const DenormalsAsZero mode;
    encode_rows(target_->kernels(), reader, x_[k].data(), count, acts_[k].get());
}

// x_ of the first `heads`: what their blocks make of normed states, at most kChunk.
void Medusa::forward(const std::vector<const float*>& states, int heads) {
    const DenormalsAsZero mode;
    const Kernels& kernels = target_->kernels();
    const int hidden = target_->hidden(), count = static_cast<int>(states.size());
    std::vector<float> normed(states.size() * static_cast<size_t>(hidden));
    for (size_t i = 0; i < states.size(); ++i) target_->final_norm(states[i], 1, normed.data() + i * static_cast<size_t>(hidden));
    for (int k = 0; k < heads; ++k) x_[static_cast<size_t>(k)] = normed;
    const std::vector<float> ones(static_cast<size_t>(hidden), 1.0f);
    for (size_t layer = 0; layer < heads_[0].size(); ++layer) {
        const auto block = [&](int k) -> const Block& { return heads_[static_cast<size_t>(k)][layer]; };
        const Matrix& any = block(0).weight;
        for (int k = 0; k < heads; ++k) {
            encode(k, block(k).weight, count);
            y_[static_cast<size_t>(k)].resize(static_cast<size_t>(count) * static_cast<size_t>(any.out_padded()));
        }
        target_->runtime_->pool().run([&](Seat& me) {
            const Part part = me.of(heads * any.blocks);
            for (int k = 0; k < heads; ++k) {
                const int begin = std::max(part.begin - k * any.blocks, 0), end = std::min(part.end - k * any.blocks, any.blocks);
                if (begin < end)
                    kernels.matmul(block(k).weight, acts_[static_cast<size_t>(k)].get(), count, begin, end,
                        y_[static_cast<size_t>(k)].data(), any.out_padded());
            }
        }, Pool::kDrafting, static_cast<double>(any.bytes()) * heads);
        for (int k = 0; k < heads; ++k)
            for (int i = 0; i < count; ++i) {
                float* y = y_[static_cast<size_t>(k)].data() + static_cast<size_t>(i) * static_cast<size_t>(any.out_padded());
                if (!block(k).bias.empty()) kernels.add(y, block(k).bias.data(), hidden);
                kernels.gate(Activation::Silu, y, ones.data(), hidden, y);
                kernels.add(x_[static_cast<size_t>(k)].data() + static_cast<size_t>(i) * static_cast<size_t>(hidden), y, hidden);
            }
    }
}

// work(thread, head, stretch, logits [count][kStretch]) for every stretch of every head's logits of x_, by all threads.
template <class Work>
void Medusa::each_stretch(int count, int heads, const Work& work) {
    for (int k = 0; k < heads; ++k) encode(k, rows_of(k), count);
    double bytes = 0.0;
    for (const Matrix& rows : rows_) bytes += static_cast<double>(rows.bytes());
    target_->runtime_->pool().run([&](Seat& me) {
        const Part part = me.of(ranking_.stretches());
        float* y = target_->scratch_.pair[static_cast<size_t>(me.id)].get();
        for (int stretch = part.begin; stretch < part.end; ++stretch)
            for (int k = 0; k < heads; ++k) {
                stretch_product(target_->kernels(), rows_of(k), acts_[static_cast<size_t>(k)].get(), count, stretch, y);
                work(me.id, k, stretch, y);
            }
    }, Pool::kDrafting, bytes);
}

std::vector<std::vector<std::vector<RankedToken>>> Medusa::draft(const std::vector<Ask>& asks, int most) {
    std::lock_guard<std::mutex> lock(target_->lock());
    std::vector<std::vector<std::vector<RankedToken>>> drafts;
    for (size_t first = 0; first < asks.size(); first += kChunk) {
        const size_t count = std::min<size_t>(kChunk, asks.size() - first);
        const auto ask = [&](size_t i) -> const Ask& { return asks[first + i]; };
        std::vector<const float*> states;
        int heads = 0;
        for (size_t i = 0; i < count; ++i) {
            if (ask(i).heads < 1 || ask(i).heads > this->heads())
                throw std::invalid_argument("malformed draft: " + std::to_string(ask(i).heads) + " heads");
            heads = std::max(heads, ask(i).heads);
            states.push_back(ask(i).state);
        }
        forward(states, heads);
        std::vector<Ranking::Row> ranked;  // [head][ask]
        for (int k = 0; k < heads; ++k)
            for (size_t i = 0; i < count; ++i) {
                ranked.push_back({ask(i).sampling, most, kMedusaRivals});
                ranked.back().sampling.index += static_cast<uint32_t>(k);
            }
        const bool filters = std::any_of(ranked.begin(), ranked.end(), [](const Ranking::Row& row) { return row.sampling.filters(); });
        const size_t wide = static_cast<size_t>(outputs());
        if (filters) filtered_.resize(ranked.size() * wide);
        ranking_.begin(std::move(ranked));
        const int n = static_cast<int>(count);
        const auto own = [&](int row) { return filters ? filtered_.data() + static_cast<size_t>(row) * wide : nullptr; };
        each_stretch(n, heads, [&](int thread, int head, int stretch, const float* logits) {
            for (int i = 0; i < n; ++i) {
                const int row = head * n + i;
                ranking_.consider(thread, row, stretch, logits + i * kStretch, target_->kernels());
                if (filters) std::copy_n(logits + i * kStretch, ranking_.size_of(stretch), own(row) + ranking_.begin_of(stretch));
            }
        });
        for (int i = 0; i < n; ++i) {
            std::vector<std::vector<RankedToken>>& found = drafts.emplace_back();
            for (int k = 0; k < ask(static_cast<size_t>(i)).heads; ++k)
                found.push_back(ranking_.best(k * n + i, own(k * n + i), target_->kernels()));
        }
    }
    return drafts;
}

std::vector<float> Medusa::logits(const std::vector<const float*>& states) {
    std::lock_guard<std::mutex> lock(target_->lock());
    const size_t wide = static_cast<size_t>(outputs()), each = static_cast<size_t>(heads()) * wide;
    std::vector<float> found(states.size() * each);
    for (size_t first = 0; first < states.size(); first += kChunk) {
        const std::vector<const float*> some(states.begin() + static_cast<std::ptrdiff_t>(first),
            states.begin() + static_cast<std::ptrdiff_t>(std::min(first + kChunk, states.size())));
        forward(some, heads());
        each_stretch(static_cast<int>(some.size()), heads(), [&](int, int head, int stretch, const float* logits) {
            for (size_t i = 0; i < some.size(); ++i)
                std::copy_n(logits + i * kStretch, ranking_.size_of(stretch),
                    found.data() + (first + i) * each + static_cast<size_t>(head) * wide + static_cast<size_t>(ranking_.begin_of(stretch)));
        });
    }
    return found;
}

}  // namespace outpace
