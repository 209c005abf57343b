// What a forward needs to know before it computes: that the batch is well formed, what each token sees, and how attention
// is cut into jobs.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "model/model.h"

namespace outpace {

void Model::prepare_beside(const BatchView& batch) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed batch: " + what); };
    const KV& kv = beside_->kv_;
    if (batch.rows != batch.tokens || batch.wanted_count != batch.tokens || !batch.features)
        wrong("a model beside another reads features of a token a row");
    plan_.clear();
    for (int i = 0; i < batch.tokens; ++i) {
        const int cached = kv.length(batch.row[i]);
        if (cached < 1 || cached >= weights_->config.max_length || batch.position[i] != cached)
            wrong("position " + std::to_string(batch.position[i]) + " is not behind the row's " + std::to_string(cached));
        plan_.in_block(plan_.row(kv, batch.row[i], cached), batch.token[i], cached, cached - 1, cached - 1).wanted = i;
    }
    cover();
}

void Model::prepare(const BatchView& batch) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed batch: " + what); };
    const int n = batch.tokens;
    if (batch.layers < 1 || batch.layers > static_cast<int>(weights_->layers.size())) wrong("layers is out of range");
    if (recurrent() && batch.layers < static_cast<int>(weights_->layers.size()))
        wrong("recurrent layers run with all others, not the first " + std::to_string(batch.layers));
    for (const int layer : batch.hidden_layers)
        if (layer < 0 || layer >= batch.layers) wrong("layer " + std::to_string(layer) + " is not a layer that runs");
    if (!weights_->layers[0].embed_norm.empty() && !batch.features) wrong("this model reads features beside its tokens");
    if (batch.starts[0] != 0 || batch.starts[batch.rows] != n) wrong("starts does not span the tokens");
    if (beside_) return prepare_beside(batch);
    std::vector<int> seen;
    std::vector<KV::Need> needs;
    for (int b = 0; b < batch.rows; ++b) {
        const int begin = batch.starts[b], end = batch.starts[b + 1];
        if (begin < 0 || end <= begin || end > n) wrong("starts must ascend");
        const int row = batch.row[begin], cached = kv_.length(row);
        seen.push_back(row);
        needs.push_back({row, end - begin, 0});
        for (int i = begin; i < end; ++i) {
            const int parent = batch.parent[i], own = i - begin;
            if (batch.row[i] != row) wrong("a row's tokens must stand together");
            if (batch.token[i] < 0 || batch.token[i] >= weights_->config.vocab)
                wrong("token " + std::to_string(batch.token[i]) + " is not in the vocabulary");
            if (parent < -1 || parent >= own) wrong("a parent must come before its child");
            const int expected = parent < 0 ? cached : batch.position[begin + parent] + 1;
            if (batch.position[i] != expected)
                wrong("position " + std::to_string(batch.position[i]) + " should be " + std::to_string(expected));
            if (expected >= weights_->config.max_length)
                wrong("position " + std::to_string(expected) + " is beyond the model's " + std::to_string(weights_->config.max_length));
        }
    }
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) wrong("a row appears twice");
    for (int i = 0; i < batch.wanted_count; ++i)
        if (batch.wanted[i] < 0 || batch.wanted[i] >= n || (i > 0 && batch.wanted[i] <= batch.wanted[i - 1]))
            wrong("wanted must ascend within the tokens");

    for (int b = 0; b < batch.rows && recurrent(); ++b)  // refuses a tree that cannot be taken back
        needs[static_cast<size_t>(b)].settled = settled(batch, b);
    kv_.grow(needs);
    plan_.clear();
    int wanted = 0;
    for (int b = 0; b < batch.rows; ++b) {
        const int begin = batch.starts[b], end = batch.starts[b + 1], cached = kv_.length(batch.row[begin]);
        const Plan::Row row = plan_.row(kv_, batch.row[begin], cached);
        for (int i = begin; i < end; ++i) {
            Plan::Token& token = plan_.node(row, batch.token[i], batch.position[i], cached + i - begin, [&](std::vector<int32_t>& slots) {
                const size_t first = slots.size(), depth = static_cast<size_t>(batch.position[i] - cached);
                slots.resize(first + depth + 1);
                for (int d = static_cast<int>(depth), node = i - begin; d >= 0; --d, node = batch.parent[begin + node])
                    slots[first + static_cast<size_t>(d)] = cached + node;
            });
            if (wanted < batch.wanted_count && batch.wanted[wanted] == i) token.wanted = wanted++;
        }
    }
    cover();
}

// Tiles of tokens of one row, by group of heads: as wide as leaves work for every thread, since a tile reads its keys once;
// where even single tokens do not, by ranges of blocks too.
void Model::cut(Split& split, int first, int count, int threads) {
    const int groups = split.groups;
    int tile = std::max(1, std::min(8, kMaxQueries / (weights_->config.heads / groups)));
    while (tile > 1 && (count + tile - 1) / tile * groups < 2 * threads) tile /= 2;
    std::vector<Tile>& tiles = split.tiles;
    tiles.clear();
    split.jobs.clear();
    for (int t = first; t < first + count;) {
        int end = t + 1, blocks = plan_[t].position / kBlock + 1;
        for (; end < first + count && end - t < tile && plan_[end].row == plan_[t].row; ++end)
            blocks = std::max(blocks, plan_[end].position / kBlock + 1);
        tiles.push_back({t, end - t, blocks, 1, 0});
        t = end;
    }
    const int base = static_cast<int>(tiles.size()) * groups;
    const int missing = base >= 2 * threads ? 1 : 6 * threads / base;  // taken as threads become free
    size_t parts = 0;
    for (size_t i = 0; i < tiles.size(); ++i) {
        Tile& t = tiles[i];
        if (threads > 1 && missing > 1) t.ranges = std::min(t.blocks, missing);
        if (t.ranges > 1) {
            t.parts = parts;
            parts += static_cast<size_t>(t.tokens) * static_cast<size_t>(weights_->config.heads) * static_cast<size_t>(t.blocks) *
                     static_cast<size_t>(split.record);
        }
        for (int group = 0; group < groups; ++group)
            for (int r = 0; r < t.ranges; ++r) split.jobs.push_back({static_cast<int>(i), group, r});
    }
    if (scratch_.parts.size() < parts) scratch_.parts.need(parts + parts / 2);
    const size_t counters = tiles.size() * static_cast<size_t>(groups);
    if (scratch_.finished.size() < counters) scratch_.finished = std::vector<std::atomic<int>>(counters);
}

void Model::plan_jobs(int first, int count, int threads) {
    for (Split& split : splits_) cut(split, first, count, threads);
    for (std::vector<std::atomic<int>>* jobs : {&next_job_, &next_head_})
        for (std::atomic<int>& next : *jobs) next.store(0, std::memory_order_relaxed);
    for (std::atomic<int>& next : claimed_) next.store(0, std::memory_order_relaxed);
}

}  // namespace outpace
