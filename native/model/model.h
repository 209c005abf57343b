// A decoder as data, and its forward pass.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "runtime/kv.h"
#include "weights/matrix.h"
#include "runtime/pool.h"
#include "runtime/scratch.h"

namespace outpace {

// Vectors that are empty are left out of the computation.
struct Layer {
    Matrix q, k, v, o, gate, up, down;
    std::vector<float> attn_norm, post_attn_norm, ffn_norm, post_ffn_norm;  // [hidden]
    std::vector<float> q_norm, k_norm;                                      // [head_dim]
    std::vector<float> q_bias, k_bias, v_bias, o_bias;
    int window = 0;  // positions a token sees, itself among them; 0: all
    int rope = 0;    // which table
};

struct Config {
    int vocab, hidden, heads, kv_heads, head_dim, ffn;
    float eps, attention_scale, embedding_scale;
    Activation activation;
    int max_length;
};

// Cosines and sines of position * inverse_frequency, computed when a position is first seen.
class Rope {
public:
    explicit Rope(std::vector<float> inverse_frequencies) : inverse_(std::move(inverse_frequencies)) {}
    void cover(int positions);
    const float* cosines(int position) const { return cos_.data() + static_cast<size_t>(position) * inverse_.size(); }
    const float* sines(int position) const { return sin_.data() + static_cast<size_t>(position) * inverse_.size(); }
    size_t half() const { return inverse_.size(); }

private:
    std::vector<float> inverse_, cos_, sin_;
    int covered_ = 0;
};

// Packed new tokens; see Batch in models/base.py. All arrays int32.
struct BatchView {
    int tokens, rows, wanted_count;
    const int32_t *token, *row, *position, *parent, *starts, *wanted;
    std::vector<int> taps;
    int layers;  // run the first so many
};

// Logits of the wanted tokens, hidden states of the tapped layers.
class Result {
public:
    const float* logits(int i) const { return logits_->get() + static_cast<size_t>(i) * static_cast<size_t>(stride_); }
    int find(int32_t packed) const;  // index among the wanted; throws std::out_of_range
    int vocab = 0, hidden = 0, tap_count = 0, tokens = 0;
    const Kernels* kernels = nullptr;
    std::vector<int32_t> wanted;
    std::vector<Best> best;     // argmax of each wanted token's logits
    std::vector<float> taps;    // [tokens][tap_count][hidden]

private:
    friend class Model;
    std::shared_ptr<Buffer<float>> logits_;
    int64_t stride_ = 0;
};

enum Phase { kNorm, kQkv, kRope, kAttention, kOutput, kNorm2, kGateUp, kDown, kHead, kPhases };
extern const char* const kPhaseNames[kPhases];

class Model {
public:
    Model(Config config, std::vector<Layer> layers, Matrix embedding, Matrix head, std::vector<float> final_norm,
          std::vector<std::vector<float>> ropes, const Kernels& kernels, int threads, bool kv_f32, int64_t kv_limit);

    // Checks the batch, runs it, writes and lengthens the rows. Throws std::invalid_argument, std::out_of_range.
    std::unique_ptr<Result> forward(const BatchView& batch);

    KV& kv() { return kv_; }
    std::mutex& lock() { return lock_; }
    const Kernels& kernels() const { return kernels_; }
    int threads() const { return pool_.size(); }
    size_t weight_bytes() const;

    // Seconds spent in each phase since the last call, when timing is on.
    std::array<double, kPhases> take_timings();
    void time_phases(bool on) { timing_ = on; }

private:
    struct Token {
        int id, row, position, slot, cached;
        const int32_t* path;  // null: slots are positions
        const uint8_t* const* blocks;
        int wanted;  // index among the wanted, or -1
    };
    struct Tile {  // tokens of one row whose attention is computed together
        int first, tokens, blocks, ranges;
        size_t parts;  // where its blocks' partial results start, with more than one range
    };
    struct Job {
        int tile, kv_head, range;
    };
    class Run;  // one chunk of tokens through all layers; forward.cpp

    void prepare(const BatchView& batch);
    void plan_jobs(int first, int count);

    const Config config_;
    const std::vector<Layer> layers_;
    const Matrix embedding_, head_;
    const std::vector<float> final_norm_;
    std::vector<Rope> ropes_;
    const Kernels& kernels_;
    Pool pool_;
    KV kv_;
    std::mutex lock_;
    Scratch scratch_;
    std::vector<Token> tokens_;
    std::vector<int32_t> paths_;
    std::vector<Tile> tiles_;
    std::vector<Job> jobs_;
    Buffer<float> parts_;
    std::vector<std::atomic<int>> finished_;  // ranges of a tile's KV head; 0 between layers
    std::vector<std::atomic<int>> next_job_;  // one a layer
    std::vector<Best> bests_;                 // [thread][kChunk]
    std::shared_ptr<BufferPool> logits_pool_ = std::make_shared<BufferPool>();
    bool timing_ = false;
    std::array<double, kPhases> seconds_{};
};

}  // namespace outpace
