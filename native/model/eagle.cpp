#include "model/eagle.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include "model/run.h"
#include "runtime/denormals.h"

namespace outpace {

static_assert(kStretch == 2 * kGateRows && kStretch % kRows == 0, "a thread's pair holds a stretch of a whole chunk's logits");

const char* const Eagle::kPhaseNames[kPhases] = {"fuse", "store", "levels", "rest"};

struct Eagle::Row {
    const Ask* ask;
    Plan::Row kept;          // once its new real entries are
    Growth growth;
    size_t root = 0;         // the step that read the last real entry
    std::vector<size_t> steps;  // of the last level: which read each predicted entry
};

struct Eagle::Step {
    size_t row;
    int node;           // -1: the last real entry
    Sampling sampling;  // of the node's children
};

namespace {

// Adds the time since the last call to a phase.
class Watch {
public:
    void note(double& phase) {
        const auto now = std::chrono::steady_clock::now();
        phase += std::chrono::duration<double>(now - since_).count();
        since_ = now;
    }

private:
    std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

}  // namespace

Eagle::Eagle(
    std::shared_ptr<Model> model, Matrix fuse, std::vector<std::vector<float>> norms, std::vector<int32_t> tokens, bool norm_output)
    : DraftNetwork(std::move(model), std::move(fuse), std::move(norms), std::move(tokens)), norm_output_(norm_output) {
    if (model_->layers_[0].embed_norm.empty())
        throw std::invalid_argument("this is no EAGLE-3 drafter: its first layer does not read embeddings beside features");
}

std::array<double, Eagle::kPhases> Eagle::take_timings() {
    const auto taken = seconds_;
    seconds_.fill(0.0);
    return taken;
}

void Eagle::check(const std::vector<Ask>& asks) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("malformed draft: " + what); };
    std::vector<int> seen;
    for (const Ask& ask : asks) {
        const int length = model_->kv_.length(ask.row), most = model_->config_.max_length;
        seen.push_back(ask.row);
        if (ask.tokens.empty()) wrong("row " + std::to_string(ask.row) + " has no new entry");
        if (static_cast<int64_t>(length) + static_cast<int64_t>(ask.tokens.size()) > most)
            wrong("row " + std::to_string(ask.row) + " would have more than " + std::to_string(most) + " entries");
        for (const int32_t token : ask.tokens)
            if (token < 0 || token >= model_->vocab()) wrong("token " + std::to_string(token) + " is not in the vocabulary");
        if (ask.nodes < 0 || ask.nodes > kMostNodes) wrong(std::to_string(ask.nodes) + " nodes");
        if (ask.nodes > 0 && (ask.levels < 1 || ask.levels > kMostLevels || ask.branch < 1 || ask.branch > kMostBranch))
            wrong(std::to_string(ask.levels) + " levels of branches of " + std::to_string(ask.branch));
        if (!(ask.sampling.temperature >= 0.0) || std::isinf(ask.sampling.temperature))
            wrong("a temperature must be finite and not below 0");
    }
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) wrong("a row appears twice");
}

BatchView Eagle::view(int tokens, const float* features) const {
    BatchView batch{};
    batch.tokens = tokens;
    batch.layers = static_cast<int>(model_->layers_.size());
    batch.hidden_layers = {batch.layers - 1};
    batch.features = features;
    return batch;
}

// The planned tokens as entries whose output nobody reads.
void Eagle::store(const float* features) {
    Model& m = *model_;
    Pool& pool = m.runtime_->pool();
    BatchView batch = view(m.plan_.size(), features);
    batch.hidden_layers.clear();
    Result nothing;
    for (int first = 0; first < batch.tokens; first += kChunk) {
        const int count = std::min(kChunk, batch.tokens - first);
        m.plan_jobs(first, count, pool.team(Pool::kDrafting));
        Model::Run run(m, pool, nothing, batch, first, count);
        const auto body = [&](Seat& me) {
            for (int l = 0; l + 1 < batch.layers; ++l)
                if (!run.layer(me, l)) return;
            run.store(me, batch.layers - 1);
        };
        pool.run(body, Pool::kDrafting, static_cast<double>(m.weights().layers.back().k.bytes() * 2));
    }
}

// The planned tokens, one a step: their outputs to result.hidden_states; the children of each.
std::vector<std::vector<RankedToken>> Eagle::level(
    const std::vector<Row>& rows, const std::vector<Step>& steps, const float* features, Result& result) {
    Model& m = *model_;
    Pool& pool = m.runtime_->pool();
    const BatchView batch = view(m.plan_.size(), features);
    const Matrix& head = m.head_;
    result.hidden_place.resize(steps.size());
    std::iota(result.hidden_place.begin(), result.hidden_place.end(), 0);
    std::vector<std::vector<RankedToken>> children;
    for (int first = 0; first < batch.tokens; first += kChunk) {
        const int count = std::min(kChunk, batch.tokens - first);
        m.plan_jobs(first, count, pool.team(Pool::kDrafting));
        Model::Run run(m, pool, result, batch, first, count);
        std::vector<Ranking::Row> ranked;
        for (int i = first; i < first + count; ++i) {
            const Step& step = steps[static_cast<size_t>(i)];
            ranked.push_back({step.sampling, rows[step.row].ask->branch});
        }
        ranking_.begin(std::move(ranked));
        const auto read = [&](Seat& me, int stretch) {
            const int from = ranking_.begin_of(stretch), begin = from / kRows, end = std::min(begin + kStretch / kRows, head.blocks);
            float* y = m.scratch_.pair[static_cast<size_t>(me.id)].get();  // [count][kStretch]
            m.kernels_.matmul(
                head, m.scratch_.in[static_cast<size_t>(run.mine(me))].get(head.acts()), count, begin, end, y - from, kStretch);
            for (int i = 0; i < count; ++i) ranking_.consider(me.id, i, stretch, y + i * kStretch, m.kernels_);
        };
        const auto body = [&](Seat& me) {
            run.clock(me, outpace::kPhases);
            for (int l = 0; l < batch.layers; ++l)
                if (!run.layer(me, l)) return;
            if (!run.end_layers(me)) return;
            run.share(me, Model::kClaimQkv, batch.layers, ranking_.stretches(), [&](int from, int to) {
                for (int s = from; s < to; ++s) read(me, s);
            });
            run.clock(me, kHead);
        };
        pool.run(body, Pool::kDrafting, static_cast<double>(bytes() - fusion_.bytes()));
        for (int i = 0; i < count; ++i) children.push_back(ranking_.best(i, nullptr, m.kernels_));
    }
    return children;
}

std::vector<Eagle::Draft> Eagle::draft(const std::vector<Ask>& asks) {
    Watch watch;
    check(asks);
    Model& m = *model_;
    const Settled settled{m.kv_};
    const DenormalsAsZero mode;
    const size_t hidden = static_cast<size_t>(m.config_.hidden);
    std::vector<KV::Need> needs;
    for (const Ask& ask : asks)
        needs.push_back(
            {ask.row, static_cast<int>(ask.tokens.size()) + (ask.nodes > 0 ? Growth::most_entries(ask.nodes, ask.levels, ask.branch) : 0)});
    m.kv_.grow(needs);
    m.plan_.clear();
    std::vector<Row> rows;
    std::vector<Step> steps;
    std::vector<const float*> states, last_states;
    for (const Ask& ask : asks) {
        const int length = m.kv_.length(ask.row), n = static_cast<int>(ask.tokens.size());
        Plan::Row row = m.plan_.row(m.kv_, ask.row, length);
        const bool drafts = ask.nodes > 0;
        for (int i = 0; i < n - drafts; ++i) {  // the last one's output is read, the others' only stored
            m.plan_.append(row, ask.tokens[static_cast<size_t>(i)], length + i);
            states.push_back(ask.states + static_cast<size_t>(i) * fusion_.wide());
        }
        row.cached = length + n;
        if (drafts) {
            steps.push_back({rows.size(), -1, ask.sampling});
            last_states.push_back(ask.states + static_cast<size_t>(n - 1) * fusion_.wide());
        }
        rows.push_back({&ask, row, Growth(ask.nodes, ask.levels, ask.branch)});
    }
    const size_t stored = states.size();
    states.insert(states.end(), last_states.begin(), last_states.end());
    std::vector<float> features(states.size() * hidden);
    watch.note(seconds_[kRest]);
    fusion_.run(m, states, features.data());
    watch.note(seconds_[kFuse]);
    if (stored > 0) m.cover(), store(features.data());
    watch.note(seconds_[kStore]);

    features.erase(features.begin(), features.begin() + static_cast<std::ptrdiff_t>(stored * hidden));
    Result result;
    size_t room = 0;  // of result.hidden_states, in steps
    while (!steps.empty()) {
        m.plan_.clear_tokens();
        for (size_t i = 0; i < steps.size(); ++i) {
            Row& row = rows[steps[i].row];
            const int base = row.kept.cached;
            if (steps[i].node < 0) {
                Plan::Row before = row.kept;
                --before.cached;
                m.plan_.append(before, row.ask->tokens.back(), base - 1).wanted = static_cast<int>(i);
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
        if (room < steps.size()) {
            room = steps.size();
            result.hidden_states.reset(new float[room * hidden]);
        }
        watch.note(seconds_[kRest]);
        const std::vector<std::vector<RankedToken>> children = level(rows, steps, features.data(), result);
        watch.note(seconds_[kLevels]);

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
                if (norm_output_) m.kernels_.rmsnorm(output, m.final_norm_.data(), m.config_.eps, m.config_.hidden, features.data() + to);
            }
        }
        steps = std::move(next);
    }
    std::vector<Draft> drafts(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].ask->nodes == 0) continue;
        for (const Growth::Node& node : rows[i].growth.likeliest()) {
            drafts[i].tokens.push_back(node.token);
            drafts[i].parents.push_back(node.parent);
            drafts[i].chances.push_back(static_cast<float>(node.chance));
        }
    }
    for (const Ask& ask : asks) m.kv_.lengthen(ask.row, static_cast<int>(ask.tokens.size()));
    watch.note(seconds_[kRest]);
    return drafts;
}

}  // namespace outpace
