#include "model/eagle.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include "model/run.h"
#include "runtime/denormals.h"

namespace outpace {

static_assert(kStretch == 2 * kGateRows && kStretch % kRows == 0, "a thread's pair holds a stretch of a whole chunk's logits");

struct Eagle::Row {
    const Ask* ask;
    Plan::Row kept;          // once its new real entries are
    int branch;
    Growth growth;
    size_t root = 0;         // the step that read the last real entry
    std::vector<size_t> steps;  // of the last level: which read each predicted entry

    Plan::Row before() const {  // its last real entry
        Plan::Row row = kept;
        --row.cached;
        return row;
    }
};

struct Eagle::Step {
    size_t row;
    int node;           // -1: the last real entry
    Sampling sampling;  // of the node's children
};

Eagle::Eagle(std::shared_ptr<Model> model, Matrix fuse, std::vector<std::vector<float>> norms, std::vector<int32_t> tokens,
    bool norm_output, const std::optional<Mask>& mask)
    : DraftNetwork(std::move(model), std::move(fuse), std::move(norms), std::move(tokens)), norm_output_(norm_output) {
    if (model_->weights_->layers[0].embed_norm.empty())
        throw std::invalid_argument("this is no EAGLE-3 drafter: its first layer does not read embeddings beside features");
    if (!mask) return;
    if (mask->states.size() != wide())
        throw std::invalid_argument("this is no P-EAGLE drafter: a mask's states have " + std::to_string(mask->states.size()) + " values");
    check_token(mask->token);
    mask_ = mask->token;
    std::lock_guard<std::mutex> lock(model_->lock());
    masked_ = features({mask->states.data()});
}

void Eagle::check(const std::vector<Ask>& asks) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed draft: " + what); };
    std::vector<int> rows;
    for (const Ask& ask : asks) {
        const int length = model_->kv_.length(ask.row), most = model_->weights_->config.max_length;
        rows.push_back(ask.row);
        if (ask.tokens.empty()) wrong("row " + std::to_string(ask.row) + " has no new entry");
        if (static_cast<int64_t>(length) + static_cast<int64_t>(ask.tokens.size()) > most)
            wrong("row " + std::to_string(ask.row) + " would have more than " + std::to_string(most) + " entries");
        for (const int32_t token : ask.tokens) check_token(token);
        if (ask.nodes < 0 || ask.nodes > kMostNodes) wrong(std::to_string(ask.nodes) + " nodes");
        if (ask.nodes > 0 && (ask.levels < 1 || ask.levels > kMostLevels || ask.branch < 1 || ask.branch > kMostBranch))
            wrong(std::to_string(ask.levels) + " levels of branches of " + std::to_string(ask.branch));
        check_noise(ask.sampling);
    }
    check_once(std::move(rows));
}

// The planned tokens as entries whose output nobody reads.
void Eagle::store(const float* features) {
    BatchView batch = planned(features);
    batch.hidden_layers.clear();
    Result nothing;
    Model::Run::each_chunk(*model_, nothing, batch, kChunk, [&](Model::Run& run) {
        run.draft(model_->weights().layers.back().k.bytes() * 2, [&](Seat& me) {
            for (int l = 0; l + 1 < batch.layers; ++l)
                if (!run.layer(me, l)) return;
            run.store(me, batch.layers - 1);
        });
    });
}

// The planned tokens, one a step: their outputs to result.hidden_states; the children of each.
std::vector<std::vector<RankedToken>> Eagle::level(
    const std::vector<Row>& rows, const std::vector<Step>& steps, const float* features, Result& result) {
    Model& m = *model_;
    const Matrix& head = m.weights_->head;
    result.hidden_place.resize(steps.size());
    std::iota(result.hidden_place.begin(), result.hidden_place.end(), 0);
    std::vector<std::vector<RankedToken>> children;
    const BatchView batch = planned(features);
    Model::Run::each_chunk(m, result, batch, kChunk, [&](Model::Run& run) {
        std::vector<Ranking::Row> ranked;
        for (int i = run.first_; i < run.first_ + run.n_; ++i) {
            const Step& step = steps[static_cast<size_t>(i)];
            ranked.push_back({step.sampling, rows[step.row].branch});
        }
        ranking_.begin(std::move(ranked));
        run.draft(bytes() - fuse_.bytes(), [&](Seat& me) {
            if (!run.layers(me)) return;
            const uint8_t* in = m.scratch_.in[static_cast<size_t>(run.mine(me))].get(head.acts());
            float* y = m.scratch_.pair[static_cast<size_t>(me.id)].get();  // [tokens][kStretch]
            run.share(me, Model::kClaimQkv, batch.layers, ranking_.stretches(), [&](int from, int to) {
                for (int stretch = from; stretch < to; ++stretch) {
                    stretch_product(m.kernels_, head, in, run.n_, stretch, y, m.weights_->config.logit_cap);
                    for (int i = 0; i < run.n_; ++i) ranking_.consider(me.id, i, stretch, y + i * kStretch, m.kernels_);
                }
            });
            run.clock(me, kHead);
        });
        for (int i = 0; i < run.n_; ++i) children.push_back(ranking_.best(i, nullptr, m.kernels_));
    });
    return children;
}

// Level by level, from features of the rows' last real entries.
void Eagle::grow(std::vector<Row>& rows, std::vector<float> features) {
    Model& m = *model_;
    const size_t hidden = static_cast<size_t>(m.weights_->config.hidden);
    std::vector<Step> steps;
    for (size_t r = 0; r < rows.size(); ++r)
        if (rows[r].ask->nodes > 0) steps.push_back({r, -1, rows[r].ask->sampling});
    Result result;
    while (!steps.empty()) {
        m.plan_.clear_tokens();
        for (size_t i = 0; i < steps.size(); ++i) {
            Row& row = rows[steps[i].row];
            const int base = row.kept.cached;
            if (steps[i].node < 0) {
                m.plan_.append(row.before(), row.ask->tokens.back(), base - 1).wanted = static_cast<int>(i);
                row.root = i;
                continue;
            }
            const Growth::Node& node = row.growth.node(steps[i].node);
            m.plan_
                .node(row.kept, node.token, base + node.depth - 1, base + node.entry, [&](std::vector<int32_t>& slots) {
                const size_t first = slots.size();
                row.growth.path(steps[i].node, slots);
                for (size_t d = first; d < slots.size(); ++d) slots[d] += base;
            }).wanted = static_cast<int>(i);
            row.steps.resize(std::max(row.steps.size(), static_cast<size_t>(node.entry) + 1));
            row.steps[static_cast<size_t>(node.entry)] = i;
        }
        m.cover();
        result.hidden_states.reset(new float[steps.size() * hidden]);
        const std::vector<std::vector<RankedToken>> children = level(rows, steps, features.data(), result);

        std::vector<Step> next;
        features.clear();
        for (size_t i = 0; i < steps.size();) {
            const size_t at = steps[i].row;
            Row& row = rows[at];
            Sampling sampling = steps[i].sampling;
            ++sampling.index;
            std::vector<std::vector<RankedToken>> found;
            for (; i < steps.size() && steps[i].row == at; ++i) found.push_back(children[i]);
            row.growth.grow(found);
            for (const int n : row.growth.expand()) {
                next.push_back({at, n, sampling});
                const int parent = row.growth.node(n).parent;
                const size_t from = parent < 0 ? row.root : row.steps[static_cast<size_t>(row.growth.node(parent).entry)];
                const float* output = result.hidden_states.get() + from * hidden;
                const size_t to = features.size();
                features.insert(features.end(), output, output + hidden);
                if (norm_output_)
                    m.kernels_.rmsnorm(
                        output, m.weights_->final_norm.data(), m.weights_->config.eps, m.weights_->config.hidden, features.data() + to);
            }
        }
        steps = std::move(next);
    }
}

// All levels of all rows in one forward: masks behind the last real entry. What a node is does not change what follows it.
void Eagle::grow_at_once(std::vector<Row>& rows, const std::vector<float>& last) {
    Model& m = *model_;
    const size_t hidden = static_cast<size_t>(m.weights_->config.hidden);
    std::vector<Step> steps;
    std::vector<float> features;
    m.plan_.clear_tokens();
    size_t drafting = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
        const Row& row = rows[r];
        if (row.ask->nodes == 0) continue;
        const float* real = last.data() + drafting++ * hidden;
        Sampling sampling = row.ask->sampling;
        for (int depth = 0; depth < row.ask->levels; ++depth, ++sampling.index) {
            const float* from = depth == 0 ? real : masked_.data();
            features.insert(features.end(), from, from + hidden);
            m.plan_.append(row.before(), depth == 0 ? row.ask->tokens.back() : mask_, row.kept.cached - 1 + depth).wanted =
                static_cast<int>(steps.size());
            steps.push_back({r, -1, sampling});
        }
    }
    if (steps.empty()) return;
    m.cover();
    Result result;
    result.hidden_states.reset(new float[steps.size() * hidden]);
    const std::vector<std::vector<RankedToken>> children = level(rows, steps, features.data(), result);
    size_t first = 0;
    for (Row& row : rows) {
        if (row.ask->nodes == 0) continue;
        size_t expanded = 1;
        for (int depth = 0; depth < row.ask->levels && expanded > 0; ++depth) {
            row.growth.grow(std::vector<std::vector<RankedToken>>(expanded, children[first + static_cast<size_t>(depth)]));
            expanded = row.growth.expand().size();
        }
        first += static_cast<size_t>(row.ask->levels);
    }
}

std::vector<Draft> Eagle::draft(const std::vector<Ask>& asks) {
    std::lock_guard<std::mutex> lock(model_->lock());
    check(asks);
    Model& m = *model_;
    const Settled settled{m.kv_};
    const DenormalsAsZero mode;
    const size_t hidden = static_cast<size_t>(m.weights_->config.hidden);
    std::vector<KV::Need> needs;
    for (const Ask& ask : asks) {
        const int predicted = masked() ? ask.levels - 1 : Growth::most_entries(ask.nodes, ask.levels, ask.branch);
        needs.push_back({ask.row, static_cast<int>(ask.tokens.size()) + (ask.nodes > 0 ? predicted : 0)});
    }
    m.kv_.grow(needs);
    m.plan_.clear();
    std::vector<Row> rows;
    std::vector<const float*> states, last_states;
    for (const Ask& ask : asks) {
        const int length = m.kv_.length(ask.row), n = static_cast<int>(ask.tokens.size());
        Plan::Row row = m.plan_.row(m.kv_, ask.row, length);
        const bool drafts = ask.nodes > 0;
        for (int i = 0; i < n - drafts; ++i) {  // the last one's output is read, the others' only stored
            m.plan_.append(row, ask.tokens[static_cast<size_t>(i)], length + i);
            states.push_back(ask.states + static_cast<size_t>(i) * wide());
        }
        row.cached = length + n;
        if (drafts) last_states.push_back(ask.states + static_cast<size_t>(n - 1) * wide());
        const bool wide_open = masked() && ask.branch > 1;
        const int branch = wide_open ? std::min(ask.nodes, kMostBranch) : ask.branch;
        rows.push_back({&ask, row, branch, Growth(ask.nodes, ask.levels, branch, masked() ? 0.0 : ask.floor)});
    }
    const size_t stored = states.size();
    states.insert(states.end(), last_states.begin(), last_states.end());
    std::vector<float> features = this->features(states);
    if (stored > 0) m.cover(), store(features.data());

    features.erase(features.begin(), features.begin() + static_cast<std::ptrdiff_t>(stored * hidden));
    if (masked())
        grow_at_once(rows, features);
    else
        grow(rows, std::move(features));
    std::vector<Draft> drafts(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].ask->nodes == 0) continue;
        for (const Growth::Node& node : rows[i].growth.likeliest()) drafts[i].add(node.token, node.parent, static_cast<float>(node.chance));
        drafts[i].levels = masked() ? -1 : rows[i].growth.depth();
    }
    for (const Ask& ask : asks) m.kv_.lengthen(ask.row, static_cast<int>(ask.tokens.size()));
    return drafts;
}

}  // namespace outpace
