// How rows choose from a forward's logits, and follow their drafts while the choice is one of a node's children.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "model/model.h"
#include "sampling/choose.h"

namespace outpace {

// A row's parameters, noise and rules.
struct Chooser {
    Sampling sampling;
    std::vector<Edit> edits;

    // The choice from the result's logits number `i`.
    int choose(const Result& result, int i, Workspace& workspace) const {
        return outpace::choose(
            result.logits(i), result.vocab, &result.best[static_cast<size_t>(i)], edits, sampling, *result.kernels, workspace);
    }
    void advance(int32_t token) {
        ++sampling.index;
        for (Edit& edit : edits) edit.advance(token);
    }
};

// exact.verify.walk for one row, whose pending token is packed at `start`: how many of its `k` nodes are accepted, or -1 where
// that cannot be decided here. `parents` null: a chain. `chooser` null: greedy without rules. `gained` [k + 1] and `path` [k]
// are the verdict's; they were 0, and stay so beyond it.
inline int walk(const Result& result, int start, const int32_t* tokens, const int32_t* parents, int k, Chooser* chooser, int32_t* gained,
    int32_t* path, Workspace& workspace) {
    for (int at = -1, depth = 0;; ++depth) {
        const int found = result.find(start + 1 + at);
        int choice;
        try {
            choice = chooser ? chooser->choose(result, found, workspace) : greedy(result.best[static_cast<size_t>(found)]);
        } catch (const std::logic_error&) {  // a rule of another vocabulary: `choose` says so, to this row alone
            choice = kUndecided;
        }
        if (choice < 0) {
            std::fill(gained, gained + depth, 0);
            std::fill(path, path + depth, 0);
            return -1;
        }
        gained[depth] = choice;
        int child = at + 1;
        while (child < k && (tokens[child] != choice || (parents ? parents[child] : child - 1) != at)) child = parents ? child + 1 : k;
        if (child >= k) return depth;
        path[depth] = child;
        at = child;
        if (chooser) chooser->advance(choice);
    }
}

// decide(i, workspace) for all i below `count`: by whichever thread comes first to each where `sampled` of them, more than one,
// have the vocabulary to go through.
template <class Decide>
void decide_all(Runtime* runtime, int count, int sampled, const Decide& decide) {
    if (sampled < 2 || !runtime) {
        Workspace workspace;
        for (int i = 0; i < count; ++i) decide(i, workspace);
        return;
    }
    std::lock_guard<std::mutex> lock(runtime->lock());
    std::atomic<int> next{0};
    std::exception_ptr failed;
    std::mutex failing;
    runtime->pool().run([&](Seat&) {
        try {
            Workspace workspace;
            for (int i = next.fetch_add(1); i < count; i = next.fetch_add(1)) decide(i, workspace);
        } catch (...) {
            std::lock_guard<std::mutex> one(failing);
            failed = std::current_exception();
        }
    }, Pool::kSampling, static_cast<double>(sampled));
    if (failed) std::rethrow_exception(failed);
}

}  // namespace outpace
