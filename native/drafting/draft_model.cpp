#include "drafting/draft_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <mutex>
#include <stdexcept>

#include "drafting/learned.h"
#include "model/ranks.h"
#include "runtime/denormals.h"
#include "sampling/shortlist.h"

namespace outpace {

namespace {

constexpr int kLevels = 15;     // of a draft that stops at a floor
constexpr double kNear = 0.15;  // the chance of a path to a second choice that is drafted beside the first

bool greedy(const Chooser& chooser) { return chooser.sampling.temperature == 0.0 && chooser.edits.empty(); }

}  // namespace

void ModelDrafter::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.assign(rows.size(), {});
    std::vector<Chain> chains;
    for (size_t i = 0; i < rows.size(); ++i) {
        trees[i].levels = 0;
        if (rows[i].depth() > 0) chains.push_back(begin(rows[i], trees[i]));
    }
    share_ = std::max(catch_up_ / std::max(chains.size(), size_t{1}), least_);
    const auto reads = [&](const Chain& chain) {
        return std::all_of(chain.next, chain.next + chain.left, [&](int32_t token) { return token < model_->vocab(); });
    };
    chains.erase(std::remove_if(chains.begin(), chains.end(), std::not_fn(reads)), chains.end());
    read_behind(chains);
    for (size_t depth = 0;; ++depth) {
        const auto done = [&](const Chain& chain) {
            return chain.depth <= depth || chain.grown < depth || chain.row->fed.size() + chain.left > max_length_;
        };
        chains.erase(std::remove_if(chains.begin(), chains.end(), done), chains.end());
        const std::unique_ptr<Result> result = feed(chains);
        if (!result) return;
        // What a node's chance is takes a sum over the vocabulary, as sampling does.
        decide_all(
            result->runtime.get(), static_cast<int>(chains.size()), static_cast<int>(chains.size()), [&](int i, Workspace& workspace) {
            Chain& chain = chains[static_cast<size_t>(i)];
            chain.choice = choose(chain, *result, i, workspace);
            if (chain.choice >= 0) rate(chain, *result, i);
        });
        for (Chain& chain : chains) {
            ++chain.tree->levels;
            if (chain.choice >= 0) grow(chain);  // else its rules forbid every token, or the model's logits are not finite
        }
    }
}

// How likely the choice is to be the target's, and a second one. Under noise, which the target shares, the choice itself may be
// unlikely: how sure the model is of anything says more.
void ModelDrafter::rate(Chain& chain, const Result& result, int i) const {
    const DenormalsAsZero mode;
    const float* logits = result.logits(i);
    const Best& best = result.best[static_cast<size_t>(i)];
    const double sum = log_sum(logits, result.vocab, best, *result.kernels);
    const auto chance = [&](int token) { return std::exp(static_cast<double>(logits[token]) - sum); };
    chain.rival = kUndecided;
    chain.chance = chance(chain.chooser.sampling.temperature == 0.0 ? chain.choice : best.index);
    if (!chain.asked->adaptive || !greedy(chain.chooser)) return;
    std::array<int32_t, 2> two{-1, -1};
    likeliest(logits, result.vocab, 2, *result.kernels, two.data());
    const int32_t rival = two[two[0] == chain.choice];
    if (rival >= 0 && rival < vocab_) chain.rival = rival, chain.near = chance(rival);
}

void ModelDrafter::grow(Chain& chain) const {
    Draft& tree = *chain.tree;
    const int32_t parent = chain.end;
    const double before = chain.path;
    chain.path *= chain.chance;
    chain.end = tree.add(chain.choice, parent, chain.path);
    chain.chooser.advance(chain.choice);
    ++chain.grown;
    const double price = std::max(chain.asked->floor, kNear);
    // A node less for the chain, as deep as it may still go.
    const size_t room = static_cast<size_t>(chain.asked->size) - std::min(tree.size(), static_cast<size_t>(chain.asked->size));
    if (chain.rival >= 0 && before * chain.near >= price && room > 0) {
        tree.add(chain.rival, parent, before * chain.near);
        chain.depth = std::min(chain.depth, chain.grown + room - 1);
    }
    if (chain.asked->floor > 0.0 && chain.path < chain.asked->floor) chain.depth = chain.grown;
    chain.next = &tree.tokens[static_cast<size_t>(chain.end)], chain.left = 1;
}

void ModelDrafter::read_behind(std::vector<Chain>& chains) {
    std::vector<Chain> behind;
    for (const Chain& chain : chains)
        if (chain.left > most(chain)) behind.push_back(chain);
    if (behind.empty()) return;
    chains.erase(std::remove_if(chains.begin(), chains.end(), [&](const Chain& chain) { return chain.left > most(chain); }), chains.end());
    std::lock_guard<std::mutex> lock(model_->lock());
    while (!behind.empty()) {
        try {
            forward(behind, false);
            return;
        } catch (const MemoryLimit&) {
            model_->kv().free(behind.back().row->cached);
            rows_->rows.erase(behind.back().asked->row);
            behind.pop_back();
        }
    }
}

// Rolls the row back to what it has in common with the committed tokens, of which the last one is always to be fed. A row that
// lacks tokens before `asked.start` is read from there on: at positions of its own, since a draft is a guess. One that the cache has
// no room for is read from its middle on, so that half of the positions are left for what comes.
ModelDrafter::Chain ModelDrafter::begin(const Asked& asked, Draft& tree) {
    std::lock_guard<std::mutex> lock(model_->lock());
    KV& kv = model_->kv();
    auto found = rows_->rows.find(asked.row);
    if (found == rows_->rows.end()) found = rows_->rows.emplace(asked.row, DraftRows::Row{kv.alloc(), {}, 0}).first;
    DraftRows::Row& row = found->second;
    const size_t last = asked.n - 1, held = std::min(row.fed.size(), static_cast<size_t>(kv.length(row.cached)));
    const int32_t* own = asked.tokens + std::min(row.start, last);
    size_t known = static_cast<size_t>(std::mismatch(own, std::min(own + held, asked.tokens + last), row.fed.begin()).first - own);
    known = static_cast<size_t>(kv.reachable(row.cached, static_cast<int>(known)));
    const size_t start = std::min(static_cast<size_t>(asked.start), last);
    if (!known || row.start + known < start) row.start = start, known = 0;
    if (asked.n - row.start >= max_length_) row.start = std::max(start, last - max_length_ / 2), known = 0;
    kv.truncate(row.cached, static_cast<int>(known));
    row.fed.resize(known);
    const int depth = asked.floor > 0.0 ? std::min(asked.size, kLevels) : asked.depth();
    const size_t end = row.start + known;
    return {&asked, &tree, &row, asked.tokens + end, asked.n - end, {sampling_of(asked), asked.edits ? *asked.edits : std::vector<Edit>()},
        static_cast<size_t>(depth)};
}

// Logits after each row's last token, for those rows that there is memory for, from the first on; null: for none. The others'
// memory is given back.
std::unique_ptr<Result> ModelDrafter::feed(std::vector<Chain>& chains) {
    std::lock_guard<std::mutex> lock(model_->lock());
    while (!chains.empty()) {
        try {
            return forward(chains, true);
        } catch (const MemoryLimit&) {
            model_->kv().free(chains.back().row->cached);
            rows_->rows.erase(chains.back().asked->row);
            chains.pop_back();
        }
    }
    return nullptr;
}

// Feeds what is left of every row, or (`last` false) as much of each as it reads in a step.
std::unique_ptr<Result> ModelDrafter::forward(std::vector<Chain>& chains, bool last) {
    std::vector<int32_t> token, row, position, parent, starts{0}, wanted;
    const auto count = [&](const Chain& chain) { return last ? chain.left : most(chain); };
    for (const Chain& chain : chains) {
        const auto n = static_cast<int32_t>(count(chain)), first = static_cast<int32_t>(chain.row->fed.size());
        for (int32_t k = 0; k < n; ++k)
            token.push_back(chain.next[k]), row.push_back(chain.row->cached), position.push_back(first + k), parent.push_back(k - 1);
        starts.push_back(static_cast<int32_t>(token.size()));
        if (last) wanted.push_back(starts.back() - 1);
    }
    std::unique_ptr<Result> result = model_->forward({static_cast<int>(token.size()), static_cast<int>(starts.size()) - 1,
        static_cast<int>(wanted.size()), token.data(), row.data(), position.data(), parent.data(), starts.data(), wanted.data(), {},
        static_cast<int>(model_->weights().layers.size()), nullptr, nullptr});
    for (Chain& chain : chains) {
        const size_t n = count(chain);
        chain.row->fed.insert(chain.row->fed.end(), chain.next, chain.next + n);
        chain.next += n, chain.left -= n;
    }
    return result;
}

// Among the tokens that both models have.
int ModelDrafter::choose(const Chain& chain, const Result& result, int i, Workspace& workspace) const {
    const int vocab = std::min(vocab_, result.vocab);
    const Best* best = vocab == result.vocab ? &result.best[static_cast<size_t>(i)] : nullptr;
    try {
        return outpace::choose(result.logits(i), vocab, best, chain.chooser.edits, chain.chooser.sampling, *result.kernels, workspace);
    } catch (const std::logic_error&) {  // a penalty on a token that the draft model lacks
        return kUndecided;
    }
}

}  // namespace outpace
