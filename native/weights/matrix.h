// A weight matrix in the layout that the kernels read; see layout.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "weights/layout.h"

namespace outpace {

// Bytes of one group of one token's encoded activations.
//   I8:  i8[32] q, f32 scale of q[0..15], f32 scale of q[16..31], f32 sum of scale * q, i32 -128 * sum(q[0..15]),
//        i32 -128 * sum(q[16..31])
//   B16: bf16[32];  F32: f32[32]
constexpr int act_bytes(Acts acts) { return acts == Acts::I8 ? 52 : acts == Acts::B16 ? 64 : 128; }

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

struct Matrix {
    Format format;
    int rows, cols;        // as in the model
    int blocks;            // row blocks, rounded up so that outputs fill whole superblocks of the next matrix
    int groups;            // groups along the inputs, rounded up to whole superblocks
    size_t block_bytes;    // bytes of a row block
    const uint8_t* data;   // 64-byte aligned
    std::shared_ptr<void> memory;  // what owns data

    int out_padded() const { return blocks * kRows; }
    int in_padded() const { return groups * kGroup; }
    Acts acts() const { return layout_of(format).acts; }
    size_t bytes() const { return block_bytes * static_cast<size_t>(blocks); }
};

}  // namespace outpace
