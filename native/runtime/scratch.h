// Working memory of a forward: allocated once for the largest chunk of the largest model, aligned, never shrunk.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels/table.h"
#include "weights/matrix.h"

namespace outpace {

constexpr int kChunk = 128;  // tokens that pass through the layers together; a longer forward takes several passes
constexpr int kSolo = 2;     // most tokens whose norms every thread computes for itself, which is cheaper than a barrier

// Zeroed memory on cache-line boundaries.
template <class T>
class Buffer {
    static constexpr std::align_val_t kLine{64};

public:
    Buffer() = default;
    explicit Buffer(size_t count) : count_(count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        void* raw = nullptr;
        if (bytes > 0) {
            raw = ::operator new(bytes, kLine);
            std::memset(raw, 0, bytes);
        }
        data_.reset(static_cast<T*>(raw));
    }
    T* get() const { return data_.get(); }
    size_t size() const { return count_; }
    void need(size_t count) {  // at least so many; what it held is lost when it grows
        if (count_ < count) *this = Buffer(count);
    }

private:
    struct Free {
        void operator()(T* p) const { ::operator delete(p, kLine); }
    };
    std::unique_ptr<T, Free> data_;
    size_t count_ = 0;
};

// Logits buffers go round: fresh memory for each forward would cost a page fault every 4 KiB.
class BufferPool {
public:
    std::shared_ptr<Buffer<float>> take(size_t count) {
        constexpr size_t kept = 4, largest = size_t{64} << 20;  // buffers; floats
        for (const auto& buffer : buffers_)
            if (buffer.use_count() == 1 && buffer->size() >= count) {
                std::atomic_thread_fence(std::memory_order_acquire);  // whoever had it has read it
                return buffer;
            }
        auto fresh = std::make_shared<Buffer<float>>(count);
        const auto free = std::find_if(buffers_.begin(), buffers_.end(), [](const auto& buffer) { return buffer.use_count() == 1; });
        if (free != buffers_.end()) buffers_.erase(free);
        if (buffers_.size() < kept && count <= largest) buffers_.push_back(fresh);
        return fresh;
    }

private:
    std::vector<std::shared_ptr<Buffer<float>>> buffers_;
};

// Encoded activations of one stage, in each encoding that the stage's matrices need.
struct ActBuffer {
    std::array<Buffer<uint8_t>, 3> of;
    uint8_t* get(Acts acts) const { return of[static_cast<size_t>(acts)].get(); }
    void need(Acts acts, int groups, int tokens = kChunk) {
        of[static_cast<size_t>(acts)].need(
            static_cast<size_t>(groups) * static_cast<size_t>(tokens) * static_cast<size_t>(act_bytes(acts)));
    }
};

// Vectors x [n][m.cols], encoded for the products of `m`: `acts` has room for n tokens.
inline void encode_rows(const Kernels& kernels, const Matrix& m, const float* x, int n, uint8_t* acts) {
    std::vector<float> line(static_cast<size_t>(m.in_padded()));
    for (int t = 0; t < n; ++t) {
        std::copy_n(x + static_cast<size_t>(t) * static_cast<size_t>(m.cols), m.cols, line.data());
        kernels.encode(m.acts(), line.data(), 0, m.groups, acts, n, t);
    }
}

constexpr int kGateRows = 128;  // rows of gate and up that a thread computes before it multiplies them

// Models that share a runtime use it in turn: each finds what the other left, so nothing may be read before it is written.
struct Scratch {
    explicit Scratch(int threads)
        : x(static_cast<size_t>(threads)),
          in(x.size()),
          router_in(x.size()),
          expert_in(x.size()),
          gathered(x.size()),
          tiles(x.size()),
          line(x.size()),
          pair(x.size()),
          bests(x.size() * kChunk) {}

    // The first thread's, for a whole chunk: [kChunk][...]; and, for each of the others, [kSolo][...].
    std::vector<Buffer<float>> x;
    std::vector<ActBuffer> in;
    std::vector<ActBuffer> router_in, expert_in;  // where a mixture's inputs are normed apart
    std::vector<ActBuffer> gathered;  // of a thread: inputs of one expert
    std::vector<Buffer<float>> tiles;  // of a thread: recurrent states of nodes that have children
    std::vector<Buffer<float>> line;  // a thread's own row
    std::vector<Buffer<float>> pair;  // a thread's gate and up values
    Buffer<float> q, k, v;            // products
    Buffer<float> rotated;            // [kChunk][heads][dim_padded]
    Buffer<float> attended;           // [kChunk][heads][value_padded]
    Buffer<float> y;                  // output and down projections
    Buffer<float> beside;             // what stands beside attention in a layer gives
    Buffer<float> inputs;             // tokens' inputs for each layer
    ActBuffer heads, middle;          // inputs of the output and down projections
    ActBuffer latents;                // of latent attention: inputs of each head's own products, head after head
    Buffer<float> a;                    // one more product of latent attention and of recurrent layers
    Buffer<float> convolved, rates;     // of recurrent layers: [kChunk][...]
    Buffer<float> zeros;                // a tile of an empty row's
    Buffer<float> router;             // a mixture's router
    ActBuffer pairs_in;               // inputs of experts' down products, expert after expert
    Buffer<float> pairs;              // and these products
    Buffer<float> parts;              // partial results of attention
    std::vector<std::atomic<int>> finished;  // ranges of a tile's KV head; 0 between layers
    std::vector<Best> bests;          // [thread][kChunk]

    void need_in(const Matrix& m) { need_in(m, in); }  // room in `in` for the inputs of `m`
    static void need_in(const Matrix& m, std::vector<ActBuffer>& of) {
        for (size_t i = 0; i < of.size(); ++i) of[i].need(m.acts(), m.groups, i == 0 ? kChunk : kSolo);
    }
};

}  // namespace outpace
