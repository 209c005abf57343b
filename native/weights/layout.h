// Where a superblock of each weight format keeps its numbers: the one place that says so.
//
// 16 output rows make a row block; a row block is a run of superblocks along the inputs, so that one pass over a matrix
// is one forward walk through memory. A group is 32 inputs. First stand the groups' values, one group after the other,
// then what scales them:
//
//   format  groups  bytes  values of a group   then, a group                      then                  value
//   I4S     2         576  256 B nibbles       f16[16] scale                                            d (q - 8)
//   I4M     2         640  256 B nibbles       f16[16] scale, f16[16] minimum                           d q + m
//   I4C     2         576  256 B nibbles       f16[16] scale                                            d code[q]
//   I5S     2         704  320 B fives         f16[16] scale                                            d (q - 16)
//   I5M     2         768  320 B fives         f16[16] scale, f16[16] minimum                           d q + m
//   I8S     2        1088  512 B (q + 128)     f16[16] scale                                            d q
//   K4      8        2368  256 B nibbles       u8[16] sc, u8[16] mn               f16[16] d, f16[16] dmin  d sc q - dmin mn
//   K4C     8        2240  256 B nibbles       i8[16] sc                          f16[16] d, 32 B unused   d sc code[q]
//   K5      8        2880  320 B fives         u8[16] sc, u8[16] mn               f16[16] d, f16[16] dmin  d sc q - dmin mn
//   K6      8        3392  384 B sixes         2 x i8[16] sc, of 16 inputs each   f16[16] d, 32 B unused   d sc (q - 32)
//   B16     2        2048  [16 input pairs][16 rows][2] bf16
//   H16     2        2048  [32 inputs][16 rows] f16
//   F32     2        4096  [32 inputs][16 rows] f32
//
// Nibbles: byte (i * 64 + row * 4 + b) holds input 4 i + b in its low half and input 16 + 4 i + b in its high half.
// Bytes: byte (i * 64 + row * 4 + b) holds input 4 i + b. A vector of 64 bytes then is what one integer dot-product
// instruction takes: 16 rows by 4 inputs.
// Fives: nibbles, then 64 bytes of which byte (row * 4 + b) holds, in bit i, the fifth bit of input 4 i + b.
// Sixes: nibbles, then 128 bytes of which byte (i / 4 * 64 + row * 4 + b) holds, from bit 2 (i % 4) on, the upper two.
// `code` is kCode, the codebook of IQ4_NL and IQ4_XS.
#pragma once

#include <cstdint>

namespace outpace {

enum class Format { I4S, I4M, I4C, I5S, I5M, I8S, K4, K4C, K5, K6, B16, H16, F32 };
constexpr const char* kFormatNames[] = {"I4S", "I4M", "I4C", "I5S", "I5M", "I8S", "K4", "K4C", "K5", "K6", "B16", "H16", "F32"};

// How activations must be encoded to meet a format's weights.
enum class Acts { I8, B16, F32 };

constexpr int kRows = 16;   // rows of a row block
constexpr int kGroup = 32;  // inputs of a group

// All offsets are bytes from the superblock's start; -1: the format has no such thing.
struct Layout {
    Acts acts;
    int groups;         // of a superblock
    int group_bytes;    // of a group's values
    int scale, second;  // of group 0; `second`: its minimum, or the scale of its upper 16 inputs (K6)
    int stride;         // from a group's scale to the next group's
    int d, dmin;        // of the superblock
    int bytes;          // of the superblock

    constexpr int values_of(int g) const { return group_bytes * g; }
    constexpr int scale_of(int g) const { return scale + stride * g; }
    constexpr int second_of(int g) const { return second + stride * g; }
    constexpr int inputs() const { return groups * kGroup; }
};

constexpr int kNibbles = kRows * kGroup / 2, kFives = kNibbles + 64, kSixes = kNibbles + 128, kBytes = kRows * kGroup;
constexpr int kHalves = kRows * 2;

// What the nibbles of IQ4_NL and IQ4_XS stand for (ggml's kvalues_iq4nl).
constexpr int8_t kCode[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr Layout simple_layout(int values, bool minimum) {
    const int scales = 2 * values, stride = minimum ? 2 * kHalves : kHalves;
    return {Acts::I8, 2, values, scales, minimum ? scales + kHalves : -1, stride, -1, -1, scales + 2 * stride};
}
constexpr Layout k_layout(int values, bool minimum) {
    const int scales = 8 * values, stride = 2 * kRows, d = scales + 8 * stride;
    return {Acts::I8, 8, values, scales, scales + kRows, stride, d, minimum ? d + kHalves : -1, d + 2 * kHalves};
}
constexpr Layout k_code_layout() {
    const int scales = 8 * kNibbles, d = scales + 8 * kRows;
    return {Acts::I8, 8, kNibbles, scales, -1, kRows, d, -1, d + 2 * kHalves};
}
constexpr Layout plain_layout(Acts acts, int value_bytes) {
    const int values = kRows * kGroup * value_bytes;
    return {acts, 2, values, -1, -1, 0, -1, -1, 2 * values};
}

constexpr Layout layout_of(Format format) {
    switch (format) {
        case Format::I4S: return simple_layout(kNibbles, false);
        case Format::I4M: return simple_layout(kNibbles, true);
        case Format::I4C: return simple_layout(kNibbles, false);
        case Format::I5S: return simple_layout(kFives, false);
        case Format::I5M: return simple_layout(kFives, true);
        case Format::I8S: return simple_layout(kBytes, false);
        case Format::K4: return k_layout(kNibbles, true);
        case Format::K4C: return k_code_layout();
        case Format::K5: return k_layout(kFives, true);
        case Format::K6: return k_layout(kSixes, false);
        case Format::B16: return plain_layout(Acts::B16, 2);
        case Format::H16: return plain_layout(Acts::F32, 2);
        case Format::F32: return plain_layout(Acts::F32, 4);
    }
    return plain_layout(Acts::F32, 4);
}

// Where, in a group's values, the byte that has input `i` of row `lane`: of nibbles (i < 16, its low half), of bytes.
constexpr int quant_at(int i, int lane) { return i / 4 * 64 + lane * 4 + i % 4; }
// Of input `i` of row `lane` in what follows the nibbles: the byte, counted from there, and the first bit in it.
struct UpperBits {
    int byte, bit;
};
constexpr UpperBits fifth_at(int i, int lane) { return {lane * 4 + i % 4, i / 4}; }
constexpr UpperBits sixth_at(int i, int lane) { return {i / 16 * 64 + lane * 4 + i % 4, i / 4 % 4 * 2}; }
// Of plain numbers: their index.
constexpr int pair_at(int i, int lane) { return (i / 2 * kRows + lane) * 2 + i % 2; }  // B16
constexpr int plain_at(int i, int lane) { return i * kRows + lane; }                  // H16, F32

static_assert(layout_of(Format::I4S).bytes == 576 && layout_of(Format::I4M).bytes == 640 && layout_of(Format::I4C).bytes == 576 &&
                  layout_of(Format::I5S).bytes == 704 && layout_of(Format::I5M).bytes == 768 && layout_of(Format::I8S).bytes == 1088 &&
                  layout_of(Format::K4).bytes == 2368 && layout_of(Format::K4C).bytes == 2240 && layout_of(Format::K5).bytes == 2880 &&
                  layout_of(Format::K6).bytes == 3392,
    "the table above is what the layouts say, and superblocks keep to whole cache lines");

}  // namespace outpace
