// Integer products through tiles. Sums of integers are exact, and `scaled` of matmul.h makes floats of them in the one
// order, so a result has the same bits as by that file's kernels: which of them computes may depend on the width.
//
// A row block walks along its groups in three stages: a group's weights are unpacked, kLead groups later tiles multiply
// them, kLead groups later their sums become floats. A tile load waits for whatever was just stored; by then it is not just.
#pragma once

#include "kernels/matmul.h"
#include "kernels/tiles.h"

namespace outpace {
namespace OUTPACE_NS {

constexpr int kLead = 2;
constexpr int kRing = 4;  // groups between two stages, and the one at work

// A group of 32 inputs: two halves with a scale each. Formats that are 128 too high become signed here, which saves every
// token the correction.
template <Format format>
INLINE void unpack_group(const uint8_t* superblock, int g, uint8_t* values) {
    using L = Unpack<format>;
    W q[8];
    L::values(superblock + layout_of(format).values_of(g), q);
    for (int i = 0; i < 8; ++i)
        store_i(reinterpret_cast<uint32_t*>(values + 64 * i), L::offset ? xor_i(q[i], set1_i(static_cast<int32_t>(0x80808080u))) : q[i]);
}

template <int pair, bool negative>
INLINE void multiply_group(Tiles& tiles, const uint8_t* values, const uint8_t* a, int32_t* x, int32_t* z) {
    constexpr int record = act_bytes(Acts::I8);
    tiles.zero<2 * pair>();
    tiles.zero<2 * pair + 1>();
    tiles.load<kFirstActs>(a, record);
    tiles.load<kFirstWeights>(values, 64);
    tiles.load<kFirstActs + 1>(a + kTileInputs, record);
    tiles.load<kFirstWeights + 1>(values + 4 * 64, 64);
    tiles.dot<2 * pair, kFirstActs, kFirstWeights, negative>();
    tiles.dot<2 * pair + 1, kFirstActs + 1, kFirstWeights + 1, negative>();
    tiles.store<2 * pair>(x);
    tiles.store<2 * pair + 1>(z);
}

template <Format format, int... t>
static void row_block(Pack<t...>, Tiles& tiles, const uint8_t* w, int groups, const uint8_t* a, int64_t stride, float* y, int64_t ldy) {
    using L = Unpack<format>;
    constexpr Layout at = layout_of(format);
    constexpr int tokens = static_cast<int>(sizeof...(t)), record = act_bytes(Acts::I8), lines = at.bytes / 64;
    alignas(64) uint8_t values[kRing][kBytes];
    alignas(64) int32_t sums[kRing][2][tokens][kRows];
    F acc[] = {(static_cast<void>(t), zero())...};
    for (int i = 0; i < groups + 2 * kLead; ++i) {
        if (i < groups) {
            const uint8_t* superblock = w + static_cast<int64_t>(i / at.groups) * at.bytes;
            const int group = i % at.groups;
            prefetch(superblock, lines * group / at.groups, lines * (group + 1) / at.groups);
            unpack_group<format>(superblock, group, values[i % kRing]);
        }
        const int g = i - kLead;
        if (g >= 0 && g < groups) {
            int32_t* x = sums[g % kRing][0][0];
            int32_t* z = sums[g % kRing][1][0];
            if (g % 2 == 0)
                multiply_group<0, L::offset>(tiles, values[g % kRing], a + g * stride, x, z);
            else
                multiply_group<1, L::offset>(tiles, values[g % kRing], a + g * stride, x, z);
        }
        const int done = g - kLead;
        if (done >= 0) {
            const Scales k = L::scales(w + static_cast<int64_t>(done / at.groups) * at.bytes, done % at.groups);
            const auto* x = reinterpret_cast<const uint32_t*>(sums[done % kRing][0][0]);
            const auto* z = reinterpret_cast<const uint32_t*>(sums[done % kRing][1][0]);
            ((acc[t] = scaled<L>(acc[t], {load_i(x + kRows * t), load_i(z + kRows * t)}, k, a + done * stride + record * t)), ...);
        }
    }
    (store(y + t * ldy, acc[t]), ...);
}

// n tokens in `count` tiles of one size, so that shapes are set once: the last tile may compute some tokens of the one
// before again, to the same numbers.
template <Format format, int tokens>
static void tiled_product(const Matrix& m, const uint8_t* acts, int n, int count, int begin, int end, float* y, int64_t ldy) {
    constexpr int record = act_bytes(Acts::I8);
    const int64_t stride = static_cast<int64_t>(n) * record;
    Tiles tiles(tokens);
    for (int b = begin; b < end; ++b)
        for (int i = 0; i < count; ++i) {
            const int first = (i + 1) * tokens <= n ? i * tokens : n - tokens;
            row_block<format>(Range<tokens>{}, tiles, m.data + static_cast<size_t>(b) * m.block_bytes, m.groups,
                acts + static_cast<int64_t>(first) * record, stride, y + first * ldy + b * kRows, ldy);
        }
}

template <Format format, int tokens = kTileTokens>
static void sized_product(const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
    const int count = (n + kTileTokens - 1) / kTileTokens;
    if ((n + count - 1) / count == tokens) return tiled_product<format, tokens>(m, acts, n, count, begin, end, y, ldy);
    if constexpr (tokens > 1) sized_product<format, tokens - 1>(m, acts, n, begin, end, y, ldy);
}

// The table of a path that takes integer products of enough tokens through tiles, and has all else of `base`: floats, too,
// since no tile instruction adds them in its order.
template <const Kernels& (*base)(), TileWidths& (*widths)()>
static Kernels table(const char* name) {
    Kernels k = base();
    k.name = name;
    k.matmul = [](const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
        if (n < widths().from[static_cast<int>(m.format)]) return base().matmul(m, acts, n, begin, end, y, ldy);
        with_format(Formats{}, m.format, [&](auto format) {
            if constexpr (layout_of(format.value).acts == Acts::I8)
                sized_product<format.value>(m, acts, n, begin, end, y, ldy);
            else
                base().matmul(m, acts, n, begin, end, y, ldy);
        });
    };
    return k;
}

}  // namespace OUTPACE_NS
}  // namespace outpace
