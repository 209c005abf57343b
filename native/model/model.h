// A decoder's forward pass.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "model/experts.h"
#include "model/plan.h"
#include "model/weights.h"
#include "runtime/kv.h"
#include "runtime/runtime.h"

namespace outpace {

// Cosines and sines of position * inverse_frequency, times a scale, and what queries grow by, computed when a position is first seen.
class Rope {
public:
    explicit Rope(RopeTable table) : table_(std::move(table)) {}
    void cover(int positions);
    const float* cosines(int position) const { return cos_.data() + static_cast<size_t>(position) * half(); }
    const float* sines(int position) const { return sin_.data() + static_cast<size_t>(position) * half(); }
    float growth(int position) const { return growth_.empty() ? 1.0f : growth_[static_cast<size_t>(position)]; }
    size_t half() const { return table_.frequencies.size(); }

private:
    RopeTable table_;
    std::vector<float> cos_, sin_, growth_;
    int covered_ = 0;
};

// Packed new tokens; see Batch in models/base.py. All arrays int32.
struct BatchView {
    int tokens, rows, wanted_count;
    const int32_t *token, *row, *position, *parent, *starts, *wanted;
    std::vector<int> hidden_layers;
    int layers;             // run the first so many
    const uint8_t* hidden_rows;  // [rows], 0: not; null: all
    const float* features;  // [tokens][hidden], added to the embeddings (but see Layer::embed_norm); null: none
};

// Logits of the wanted tokens, hidden states of the batch's hidden layers.
class Result {
public:
    // As if a forward had computed `logits` [wanted][vocab].
    static std::unique_ptr<Result> of(const float* logits, int vocab, std::vector<int32_t> wanted, const Kernels& kernels);

    const float* logits(int i) const { return logits_->get() + static_cast<size_t>(i) * static_cast<size_t>(stride_); }
    int find(int32_t packed) const;  // index among the wanted; throws std::out_of_range
    int vocab = 0, hidden = 0, hidden_count = 0, tokens = 0;
    int threads = 0;  // that the forward ended with
    double experts = 0.0;  // that it read in a mixture, on average; those of another pass again
    std::shared_ptr<Runtime> runtime;  // whose threads may share what is done with it; null: none
    const Kernels* kernels = nullptr;
    std::vector<int32_t> wanted;
    std::vector<Best> best;     // argmax of each wanted token's logits
    std::shared_ptr<float[]> hidden_states;  // [hidden_tokens][hidden_count][hidden]: of the rows that keep them
    std::vector<int32_t> hidden_place;      // of each token among them, or -1; empty when the batch names no layer
    int hidden_tokens = 0;

private:
    friend class Eagle;
    friend class Parallel;
    friend class Model;
    std::shared_ptr<Buffer<float>> logits_;
    int64_t stride_ = 0;
    int64_t read_ = 0;  // experts, in all mixtures
};

enum Phase { kNorm, kQkv, kRope, kAttention, kOutput, kNorm2, kGateUp, kDown, kHead, kPhases };
extern const char* const kPhaseNames[kPhases];

// Weights with a cache of their own, on a runtime that other models may use too. Its lock guards all but the constants. A model
// beside another (Config::beside) reads the rows of that one: a batch has a token a row, which reads features alone, stands behind
// all that the row has, and leaves nothing there.
class Model {
public:
    // `windowed`: rows give back what no window reaches; not for a drafter's rows, which are cut anywhere.
    Model(std::shared_ptr<const Weights> weights, std::shared_ptr<Runtime> runtime, const Kernels& kernels, KVType kv_type,
        int64_t kv_limit, bool windowed, std::shared_ptr<Model> beside = nullptr);

    // Checks the batch, runs it, writes and lengthens the rows. Throws std::invalid_argument, std::out_of_range,
    // MemoryLimit; then every row is as it was.
    std::unique_ptr<Result> forward(const BatchView& batch);

    // What a learned drafter shares with the model, for n tokens. The caller has checked ids; rows are [hidden] wide.
    void embed(const int32_t* tokens, int n, float* out) const;
    void final_norm(const float* hidden, int n, float* out) const;
    // Logits [n][count] of rows `ids` of the head; null: of all, count the vocabulary.
    void head(const float* normed, int n, const int32_t* ids, int count, float* out);
    int hidden() const { return weights_->config.hidden; }
    int vocab() const { return weights_->config.vocab; }
    int outputs() const { return weights_->config.outputs; }

    KV& kv() { return kv_; }
    std::mutex& lock() { return runtime_->lock(); }
    const Kernels& kernels() const { return kernels_; }
    const Weights& weights() const { return *weights_; }
    int threads() const { return runtime_->threads(); }

    // Seconds spent in each phase since the last call, when timing is on.
    std::array<double, kPhases> take_timings();
    void time_phases(bool on) { timing_ = on; }

private:
    friend class DraftNetwork;
    friend class Eagle;
    friend class Medusa;
    friend class Parallel;
    struct Tile {  // tokens of one row whose attention is computed together
        int first, tokens, blocks, ranges;
        size_t parts;  // where its blocks' partial results start, with more than one range
    };
    struct Job {
        int tile, group, range;  // group: of heads, see groups_of
    };
    struct Split {  // attention of a chunk's tokens, in layers of such heads
        int kv_heads, groups;
        int record;  // floats of a query's partial result
        std::vector<Tile> tiles = {};
        std::vector<Job> jobs = {};
        int kv_head(int group) const { return group * kv_heads / groups; }
    };
    class Run;  // one chunk of tokens through all layers; run.h

    void prepare(const BatchView& batch);
    void prepare_beside(const BatchView& batch);
    const KVShape& keys() const { return (beside_ ? beside_->kv_ : kv_).shape(); }  // that attention reads
    void cover() {  // what the plan's keys turn by
        for (Rope& rope : ropes_) rope.cover(plan_.end());
    }
    void plan_jobs(int first, int count, int threads);
    int split_for(int kv_heads, int record);
    int place_for(const Layer& l) const;
    void cut(Split& split, int first, int count, int threads);
    const Split& split_of(int layer) const { return splits_[static_cast<size_t>(split_of_[static_cast<size_t>(layer)])]; }
    // Of recurrent layers; recurrent.cpp.
    struct Recurrence {  // a row's tokens of a pass
        RecurrentStates::Step step;
        int first;  // of them, in the pass
    };
    bool recurrent() const { return kv_.states().shape().layers > 0; }
    int settled(const BatchView& batch, int row) const;
    int pass(const BatchView& batch, int first) const;
    void begin_pass(const BatchView& batch, int first, int count);
    void end_pass();
    void fit_scratch();

    std::shared_ptr<const Weights> weights_;
    const std::shared_ptr<Model> beside_;  // null: it has a cache of its own
    const std::shared_ptr<Runtime> runtime_;
    const Kernels& kernels_;
    Scratch& scratch_;  // the runtime's
    int hidden_stride_ = 0;  // of Scratch::x, in floats
    // Of each layer among those that have keys and values (of one that shares them, theirs), and among those that are recurrent.
    std::vector<int> places_, state_places_;
    KV kv_;
    std::vector<Rope> ropes_;
    Plan plan_;
    std::vector<Split> splits_;
    std::vector<int> split_of_;  // of each layer
    std::vector<Recurrence> recurrences_;  // of this pass
    std::vector<int> parents_, slots_;     // of its tokens: a node before it or -1; the tile that its state goes to or -1
    std::vector<float> query_scale_, key_scale_;  // of recurrent layers' heads
    std::vector<Routes> routes_;  // of each thread, which all find the same
    std::vector<std::atomic<int>> next_job_, next_head_;  // one a layer: of attention, of what recurs
    // Products that threads claim stretches of.
    enum Claim {
        kClaimJoin,
        kClaimQkv,
        kClaimBeside,
        kClaimBesideOutput,
        kClaimLatent,
        kClaimOutput,
        kClaimRouter,
        kClaimGateUp,
        kClaimExperts,
        kClaimDown,
        kClaimExpertsDown,
        kClaimInputGate,
        kClaimInputProject,
        kClaims
    };
    std::vector<std::atomic<int>> claimed_;  // of each layer, then the head as if it were one's first: how far they have come
    BufferPool logits_pool_;
    bool timing_ = false;
    std::array<double, kPhases> seconds_{};
};

}  // namespace outpace
