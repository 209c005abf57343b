// Tiles: registers of up to 16 rows of 64 bytes that one instruction multiplies (Intel AMX), and the same in plain C++, so
// that what is built on them is tested on any machine.
//
// Shapes are those of one product: tiles 0 to 3 hold sums [tokens][16] int32, 4 and 5 activations [tokens][16] bytes, 6
// and 7 weights [4][16 rows of the matrix][4] bytes. A dot adds sums[t][row] += sum over i < 16 of acts[t][i] *
// weights[i / 4][row][i % 4], exactly.
#pragma once

#include "kernels/simd.h"

namespace outpace {
namespace OUTPACE_NS {

constexpr int kTileTokens = 16;  // most of a tile
constexpr int kTileInputs = 16;  // that one scale of the activations covers
constexpr int kFirstActs = 4, kFirstWeights = 6, kAllTiles = 8;

#ifdef OUTPACE_AMX
// The instructions are spelled out: compilers' own forms do not say that a load reads memory.
class Tiles {
public:
    // The calling thread has tiles from here until the destructor.
    explicit Tiles(int tokens) {
        struct alignas(64) Shapes {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        static_assert(sizeof(Shapes) == 64, "what ldtilecfg reads");
        for (int i = 0; i < kAllTiles; ++i) {
            shapes.row_bytes[i] = i < kFirstActs || i >= kFirstWeights ? 64 : kTileInputs;
            shapes.rows[i] = static_cast<uint8_t>(i < kFirstWeights ? tokens : kTileInputs / 4);
        }
        __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
    }
    ~Tiles() { __asm__ volatile("tilerelease" : : : "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int tile>
    __attribute__((always_inline)) void zero() {
        __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
    }
    template <int tile>
    __attribute__((always_inline)) void load(const uint8_t* p, int64_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(tile) : "memory");
    }
    // `negative`: weights are signed.
    template <int sums, int acts, int weights, bool negative>
    __attribute__((always_inline)) void dot() {
        if constexpr (negative)
            __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(acts), "i"(weights));
        else
            __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(acts), "i"(weights));
    }
    template <int tile>
    __attribute__((always_inline)) void store(int32_t* p) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(int64_t{64}), "i"(tile) : "memory");
    }
};
#else
class Tiles {  // speed is not what it is for: its functions stay few
public:
    explicit Tiles(int tokens) : tokens_(tokens) { std::memset(bytes_, 0xA5, sizeof bytes_); }  // nothing starts at zero by luck
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int tile>
    __attribute__((noinline)) void zero() {
        std::memset(bytes_[tile], 0, sizeof bytes_[tile]);
    }
    template <int tile>
    __attribute__((noinline)) void load(const uint8_t* p, int64_t stride) {
        for (int r = 0; r < rows(tile); ++r) std::memcpy(bytes_[tile][r], p + r * stride, static_cast<size_t>(row_bytes(tile)));
    }
    template <int sums, int acts, int weights, bool negative>
    __attribute__((noinline)) void dot() {
        for (int t = 0; t < tokens_; ++t)
            for (int row = 0; row < 16; ++row) {
                int32_t sum;
                std::memcpy(&sum, bytes_[sums][t] + 4 * row, 4);
                for (int i = 0; i < kTileInputs; ++i) {
                    const uint8_t w = bytes_[weights][i / 4][4 * row + i % 4];
                    sum += static_cast<int8_t>(bytes_[acts][t][i]) * (negative ? static_cast<int8_t>(w) : static_cast<int>(w));
                }
                std::memcpy(bytes_[sums][t] + 4 * row, &sum, 4);
            }
    }
    template <int tile>
    __attribute__((noinline)) void store(int32_t* p) {
        for (int r = 0; r < rows(tile); ++r) std::memcpy(p + 16 * r, bytes_[tile][r], static_cast<size_t>(row_bytes(tile)));
    }

private:
    int rows(int tile) const { return tile < kFirstWeights ? tokens_ : kTileInputs / 4; }
    static int row_bytes(int tile) { return tile < kFirstActs || tile >= kFirstWeights ? 64 : kTileInputs; }

    const int tokens_;
    uint8_t bytes_[kAllTiles][16][64];
};
#endif

}  // namespace OUTPACE_NS
}  // namespace outpace
