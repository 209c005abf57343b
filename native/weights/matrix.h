// A weight matrix in the layout that the kernels read.
//
// 16 output rows make a row block; a row block is a run of superblocks along the inputs, so that one pass over a matrix
// is one forward walk through memory. A group is 32 inputs.
//
//   format  superblock            content, in order                                                      value
//   I4S     2 groups,   576 B     2 x 256 B nibbles, 2 x f16[16] scale                                    d (q - 8)
//   I4M     2 groups,   640 B     2 x 256 B nibbles, 2 x (f16[16] scale, f16[16] minimum)                 d q + m
//   I8S     2 groups,  1088 B     2 x 512 B bytes (q + 128), 2 x f16[16] scale                            d q
//   I8M     2 groups,  1152 B     2 x 512 B bytes (q), 2 x (f16[16] scale, f16[16] minimum)               d q + m
//   K4      8 groups,  2368 B     8 x 256 B nibbles, 8 x (u8[16] sc, u8[16] mn), f16[16] d, f16[16] dmin  d sc q - dmin mn
//   K5      8 groups,  4416 B     as K4 with 8 x 512 B bytes (q)
//   K6      8 groups,  4416 B     8 x 512 B bytes (q + 128), 8 x 2 x i8[16] sc, f16[16] d, 32 B unused    d sc q
//   B16     2 groups,  2048 B     [32 input pairs][16 rows][2] bf16
//   H16     2 groups,  2048 B     [64 inputs][16 rows] f16
//   F32     2 groups,  4096 B     [64 inputs][16 rows] f32
//
// Nibbles: byte (i * 64 + row * 4 + b) holds input 4 i + b in its low half and input 16 + 4 i + b in its high half.
// Bytes: byte (i * 64 + row * 4 + b) holds input 4 i + b. A vector of 64 bytes then is what one integer dot-product
// instruction takes: 16 rows by 4 inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace outpace {

enum class Format { I4S, I4M, I8S, I8M, K4, K5, K6, B16, H16, F32 };

// How activations must be encoded to meet a format's weights.
enum class Acts { I8, B16, F32 };

constexpr int kRows = 16;   // rows of a row block
constexpr int kGroup = 32;  // inputs of a group

struct Geometry {
    int groups;   // groups a superblock
    int bytes;    // bytes a superblock
    Acts acts;
};

constexpr Geometry geometry(Format format) {
    switch (format) {
        case Format::I4S: return {2, 576, Acts::I8};
        case Format::I4M: return {2, 640, Acts::I8};
        case Format::I8S: return {2, 1088, Acts::I8};
        case Format::I8M: return {2, 1152, Acts::I8};
        case Format::K4: return {8, 2368, Acts::I8};
        case Format::K5: return {8, 4416, Acts::I8};
        case Format::K6: return {8, 4416, Acts::I8};
        case Format::B16: return {2, 2048, Acts::B16};
        case Format::H16: return {2, 2048, Acts::F32};
        case Format::F32: return {2, 4096, Acts::F32};
    }
    return {0, 0, Acts::F32};
}

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
    Acts acts() const { return geometry(format).acts; }
    size_t bytes() const { return block_bytes * static_cast<size_t>(blocks); }
};

}  // namespace outpace
