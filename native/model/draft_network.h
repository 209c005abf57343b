// What learned drafters' networks have in common: a small model beside its target, features of the target's hidden states, a
// draft vocabulary, and a row of the model's cache for each row of the target.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "model/model.h"
#include "sampling/ranking.h"

namespace outpace {

class DraftNetwork {
public:
    Model& model() { return *model_; }
    int layers_read() const { return fuse_.data ? fuse_.cols / model_->hidden() : 1; }  // whose hidden states it reads
    // Numbers that a position has in these.
    size_t wide() const { return static_cast<size_t>(layers_read()) * static_cast<size_t>(model_->hidden()); }
    const std::vector<int32_t>& tokens() const { return ranking_.tokens(); }
    size_t bytes() const { return model_->weights().bytes() - model_->weights().embedding.bytes() + fuse_.bytes(); }

    // The cache's row of a row of the target's, which is made where it is not there, and given up again. They take the lock.
    int row(int of) const {  // -1: it is not there
        const auto found = rows_.find(of);
        return found == rows_.end() ? -1 : found->second;
    }
    bool take(int of) {  // whether it was made
        if (rows_.count(of)) return false;
        std::lock_guard<std::mutex> lock(model_->lock());
        rows_[of] = model_->kv().alloc();
        return true;
    }
    void drop(int of) {
        const auto gone = rows_.find(of);
        if (gone == rows_.end()) return;
        std::lock_guard<std::mutex> lock(model_->lock());
        model_->kv().free(gone->second);
        rows_.erase(gone);
    }
    const std::map<int, int>& rows() const { return rows_; }

    // Rows that a call has made: given up again unless it comes to its end.
    class Taken {
    public:
        explicit Taken(DraftNetwork& network) : network_(network) {}
        Taken(const Taken&) = delete;
        ~Taken() {
            for (const int of : made_) network_.drop(of);
        }
        int row(int64_t of) {
            const int number = static_cast<int>(of);
            if (network_.take(number)) made_.push_back(number);
            return network_.row(number);
        }
        void keep() { made_.clear(); }

    private:
        DraftNetwork& network_;
        std::vector<int> made_;
    };

protected:
    // `fuse` [hidden, layers * hidden], or none for one layer's states as they are, makes features, under `norms`: none, one for each
    // layer [hidden], or one over all [layers * hidden]. `tokens` [outputs of the model]: the target's ids, ascending. It takes the
    // lock. Throws std::invalid_argument for what does not fit together.
    DraftNetwork(std::shared_ptr<Model> model, Matrix fuse, std::vector<std::vector<float>> norms, std::vector<int32_t> tokens);

    // Features [n][hidden] of the target's hidden states [layers][hidden] of n positions. The lock is the caller's.
    std::vector<float> features(const std::vector<const float*>& hidden_states);

    // What calls are given. They throw std::invalid_argument.
    void check_token(int32_t token) const {
        if (token < 0 || token >= model_->vocab())
            throw std::invalid_argument("malformed draft: token " + std::to_string(token) + " is not in the vocabulary");
    }
    static void check_noise(const Sampling& sampling) {
        if (!(sampling.temperature >= 0.0) || std::isinf(sampling.temperature))
            throw std::invalid_argument("malformed draft: a temperature must be finite and not below 0");
    }
    static void check_once(std::vector<int> rows) {
        std::sort(rows.begin(), rows.end());
        if (std::adjacent_find(rows.begin(), rows.end()) != rows.end()) throw std::invalid_argument("malformed draft: a row appears twice");
    }

    // All planned tokens through all layers, of which the last one's outputs are kept.
    BatchView planned(const float* features) const {
        BatchView batch{};
        batch.tokens = model_->plan_.size();
        batch.layers = static_cast<int>(model_->weights_->layers.size());
        batch.hidden_layers = {batch.layers - 1};
        batch.features = features;
        return batch;
    }

    std::shared_ptr<Model> model_;
    Matrix fuse_;
    std::vector<std::vector<float>> norms_;
    Buffer<float> fused_;
    Ranking ranking_;
    std::map<int, int> rows_;  // the target's row -> the cache's
};

}  // namespace outpace
