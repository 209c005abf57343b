#include "model/eagle.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "model/run.h"

namespace outpace {

static_assert(kStretch == 2 * kGateRows && kStretch % kRows == 0, "a thread's pair holds a stretch of a whole chunk's logits");

const char* const Eagle::kPhaseNames[kPhases] = {"fuse", "store", "levels", "rest"};

struct Eagle::Row {
    const Ask* ask;
    int base;                      // real entries, the new ones too
    const uint8_t* const* blocks;
    Growth growth;
    int root = -1;                 // the step that read the last real entry
    std::vector<int> steps;        // of the last level: which read each predicted entry
};

struct Eagle::Step {
    Row* row;
    int node;           // -1: the last real entry
    Sampling sampling;  // of the node's children

    int listed() const { return std::max(row->ask->branch, sampling.temperature > 0.0 ? kRivals : 1); }
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

Eagle::Eagle(std::shared_ptr<Model> model, Matrix fuse, std::vector<std::vector<float>> norms, std::vector<int32_t> tokens, bool norm_output)
    : model_(std::move(model)),
      fusion_(*model_, std::move(fuse), std::move(norms)),
      tokens_(std::move(tokens)),
      norm_output_(norm_output),
      stretches_((model_->outputs() + kStretch - 1) / kStretch) {
    const auto wrong = [](const std::string& what) { throw std::invalid_argument("this is no EAGLE-3 drafter: " + what); };
    if (model_->layers_[0].embed_norm.empty()) wrong("its first layer does not read embeddings beside features");
    if (static_cast<int>(tokens_.size()) != model_->outputs()) wrong("it does not name a token for each row of its head");
    for (size_t i = 0; i < tokens_.size(); ++i)
        if (tokens_[i] < 0 || tokens_[i] >= model_->vocab() || (i > 0 && tokens_[i] <= tokens_[i - 1]))
            wrong("its tokens must ascend within the target's vocabulary");
    lists_.assign(static_cast<size_t>(model_->threads()), std::vector<Shortlist>(kChunk));
}

std::array<double, Eagle::kPhases> Eagle::take_timings() {
    const auto taken = seconds_;
    seconds_.fill(0.0);
    return taken;
}

bool Eagle::take(int of) {
    if (rows_.count(of)) return false;
    std::lock_guard<std::mutex> lock(model_->lock());
    rows_[of] = model_->kv_.alloc();
    return true;
}

void Eagle::drop(int of) {
    const auto gone = rows_.find(of);
    if (gone == rows_.end()) return;
    std::lock_guard<std::mutex> lock(model_->lock());
    model_->kv_.free(gone->second);
    rows_.erase(gone);
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
        if (!(ask.sampling.temperature >= 0.0) || std::isinf(ask.sampling.temperature)) wrong("a temperature must be finite and not below 0");
    }
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) wrong("a row appears twice");
}

BatchView Eagle::view(size_t tokens, const float* features) const {
    BatchView batch{};
    batch.tokens = static_cast<int>(tokens);
    batch.layers = static_cast<int>(model_->layers_.size());
    batch.taps = {batch.layers - 1};
    batch.features = features;
    return batch;
}

// The model's tokens as entries whose output nobody reads.
void Eagle::store(const float* features) {
    Model& m = *model_;
    Pool& pool = m.runtime_->pool();
    BatchView batch = view(m.tokens_.size(), features);
    batch.taps.clear();
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

// The model's tokens, one a step: their outputs to result.taps, their likeliest successors to merged_, masses to masses_.
void Eagle::level(const std::vector<Step>& steps, const float* features, Result& result) {
    Model& m = *model_;
    Pool& pool = m.runtime_->pool();
    const BatchView batch = view(steps.size(), features);
    const Matrix& head = m.head_;
    masses_.resize(steps.size() * static_cast<size_t>(stretches_));
    merged_.resize(steps.size());
    result.tap_place.resize(steps.size());
    for (size_t i = 0; i < steps.size(); ++i) result.tap_place[i] = static_cast<int32_t>(i);
    for (int first = 0; first < batch.tokens; first += kChunk) {
        const int count = std::min(kChunk, batch.tokens - first);
        m.plan_jobs(first, count, pool.team(Pool::kDrafting));
        Model::Run run(m, pool, result, batch, first, count);
        const auto step = [&](int i) -> const Step& { return steps[static_cast<size_t>(first + i)]; };
        for (std::vector<Shortlist>& lists : lists_)
            for (int i = 0; i < count; ++i) lists[static_cast<size_t>(i)].begin(step(i).listed());
        const auto read = [&](Seat& me, int s) {
            const int begin = s * (kStretch / kRows), end = std::min(begin + kStretch / kRows, head.blocks), place = s * kStretch;
            float* y = m.scratch_.pair[static_cast<size_t>(me.id)].get();  // [count][kStretch]
            m.kernels_.matmul(head, m.scratch_.in[static_cast<size_t>(run.mine(me))].get(head.acts()), count, begin, end, y - place, kStretch);
            const int its = std::min(kStretch, m.config_.outputs - place);
            for (int i = 0; i < count; ++i)
                masses_[static_cast<size_t>(first + i) * static_cast<size_t>(stretches_) + static_cast<size_t>(s)] =
                    lists_[static_cast<size_t>(me.id)][static_cast<size_t>(i)].consider(y + i * kStretch, place, its, tokens_.data() + place,
                                                                                         step(i).sampling, m.kernels_);
        };
        const auto body = [&](Seat& me) {
            run.clock(me, outpace::kPhases);
            for (int l = 0; l < batch.layers; ++l)
                if (!run.layer(me, l)) return;
            if (!run.end_layers(me)) return;
            run.share(me, Model::kClaimQkv, batch.layers, stretches_, [&](int from, int to) {
                for (int s = from; s < to; ++s) read(me, s);
            });
            run.clock(me, kHead);
        };
        pool.run(body, Pool::kDrafting, static_cast<double>(bytes() - fusion_.bytes()));
        for (int i = 0; i < count; ++i) {
            Shortlist& all = merged_[static_cast<size_t>(first + i)];
            all.begin(step(i).listed());
            for (const std::vector<Shortlist>& lists : lists_) all.add(lists[static_cast<size_t>(i)]);
        }
    }
}

std::vector<Growth::Child> Eagle::children(const Step& step, size_t at) const {
    const Mass all = whole(masses_.data() + at * static_cast<size_t>(stretches_), stretches_);
    std::vector<Growth::Child> found;
    if (std::isnan(all.top)) throw NotFinite("the drafter's network produced NaN or infinite logits: check its weights");
    const std::vector<Shortlist::Entry>& entries = merged_[at].entries();
    const std::vector<double> shares = merged_[at].shares(all, step.sampling.temperature > 0.0);
    for (size_t i = 0; i < std::min(entries.size(), static_cast<size_t>(step.row->ask->branch)); ++i)
        found.push_back({tokens_[static_cast<size_t>(entries[i].place)], shares[i]});
    return found;
}

std::vector<Eagle::Draft> Eagle::draft(const std::vector<Ask>& asks) {
    Watch watch;
    check(asks);
    Model& m = *model_;
    struct Settled {
        KV& kv;
        ~Settled() { kv.settle(); }
    } const settled{m.kv_};
    const size_t hidden = static_cast<size_t>(m.config_.hidden);
    std::vector<KV::Need> needs;
    for (const Ask& ask : asks)
        needs.push_back({ask.row, static_cast<int>(ask.tokens.size()) +
                                      (ask.nodes > 0 ? Growth::most_entries(ask.nodes, ask.levels, ask.branch) : 0)});
    m.kv_.grow(needs);
    size_t block_count = 0;
    for (const Ask& ask : asks) block_count += static_cast<size_t>(m.kv_.blocks_of(ask.row));
    m.blocks_.clear();
    m.blocks_.reserve(block_count);  // no reallocation below: rows keep pointers
    m.tokens_.clear();
    m.paths_.clear();
    std::vector<Row> rows;
    rows.reserve(asks.size());  // as for blocks_: steps keep pointers
    std::vector<const float*> taps;
    int last = 0;
    for (const Ask& ask : asks) {
        const int length = m.kv_.length(ask.row), n = static_cast<int>(ask.tokens.size());
        rows.push_back({&ask, length + n, m.blocks_.data() + m.blocks_.size(), Growth(ask.nodes, ask.levels, ask.branch)});
        for (int i = 0; i < m.kv_.blocks_of(ask.row); ++i) m.blocks_.push_back(m.kv_.block_of(ask.row, i));
        last = std::max(last, length + n + (ask.nodes > 0 ? ask.levels : 0));
        for (int i = 0; i < n - (ask.nodes > 0 ? 1 : 0); ++i) {
            m.tokens_.push_back({ask.tokens[static_cast<size_t>(i)], ask.row, length + i, length + i, length + i, length, nullptr, rows.back().blocks, -1});
            taps.push_back(ask.taps + static_cast<size_t>(i) * fusion_.wide());
        }
    }
    const size_t stored = taps.size();
    std::vector<Step> steps;
    for (Row& row : rows) {
        if (row.ask->nodes == 0) continue;
        steps.push_back({&row, -1, row.ask->sampling});
        taps.push_back(row.ask->taps + (row.ask->tokens.size() - 1) * fusion_.wide());
    }
    for (Rope& rope : m.ropes_) rope.cover(last);
    std::vector<float> features(taps.size() * hidden);
    watch.note(seconds_[kRest]);
    fusion_.run(*model_, taps, features.data());
    watch.note(seconds_[kFuse]);
    if (stored > 0) store(features.data());
    watch.note(seconds_[kStore]);

    features.erase(features.begin(), features.begin() + static_cast<std::ptrdiff_t>(stored * hidden));
    Result result;
    size_t room = 0;  // of result.taps, in steps
    while (!steps.empty()) {
        m.tokens_.clear();
        m.paths_.clear();
        size_t path_length = 0;
        for (const Step& step : steps) path_length += step.node < 0 ? 0 : static_cast<size_t>(step.row->growth.node(step.node).depth);
        m.paths_.reserve(path_length);  // tokens keep pointers
        for (size_t i = 0; i < steps.size(); ++i) {
            Row& row = *steps[i].row;
            const int wanted = static_cast<int>(i);
            if (steps[i].node < 0) {
                m.tokens_.push_back({row.ask->tokens.back(), row.ask->row, row.base - 1, row.base - 1, row.base - 1, row.base - 1, nullptr, row.blocks, wanted});
                row.root = wanted;
                continue;
            }
            const Growth::Node& node = row.growth.node(steps[i].node);
            const int32_t* path = m.paths_.data() + m.paths_.size();
            const size_t start = m.paths_.size();
            row.growth.path(steps[i].node, m.paths_);
            for (size_t d = start; d < m.paths_.size(); ++d) m.paths_[d] += row.base;
            const int position = row.base + node.depth - 1, slot = row.base + node.entry;
            // As in Model::prepare: in a chain slots are positions.
            m.tokens_.push_back({node.token, row.ask->row, position, position, slot, row.base, position == slot ? nullptr : path, row.blocks, wanted});
            row.steps.resize(std::max(row.steps.size(), static_cast<size_t>(node.entry) + 1));
            row.steps[static_cast<size_t>(node.entry)] = wanted;
        }
        if (room < steps.size()) {
            room = steps.size();
            result.taps.reset(new float[room * hidden]);
        }
        watch.note(seconds_[kRest]);
        level(steps, features.data(), result);
        watch.note(seconds_[kLevels]);

        std::vector<Step> next;
        std::vector<float> fed;
        for (size_t i = 0; i < steps.size();) {
            Row& row = *steps[i].row;
            std::vector<std::vector<Growth::Child>> found;
            const Sampling sampling = steps[i].sampling;
            for (; i < steps.size() && steps[i].row == &row; ++i) found.push_back(children(steps[i], i));
            row.growth.grow(found);
            for (const int n : row.growth.expand()) {
                next.push_back({&row, n, sampling});
                ++next.back().sampling.index;
                const int parent = row.growth.node(n).parent;
                const int from = parent < 0 ? row.root : row.steps[static_cast<size_t>(row.growth.node(parent).entry)];
                const float* its = result.taps.get() + static_cast<size_t>(from) * hidden;
                const size_t at = fed.size();
                fed.insert(fed.end(), its, its + hidden);
                if (norm_output_) m.kernels_.rmsnorm(its, m.final_norm_.data(), m.config_.eps, m.config_.hidden, fed.data() + at);
            }
        }
        steps = std::move(next);
        features = std::move(fed);
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
