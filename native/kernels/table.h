// The kernels of one instruction-set path. Everything that computes a number of the model goes through this table, and every
// path's table gives the same bits: one order of sums, 16 lanes wide; one rounding of each multiply-add; denormals as zero
// (runtime/denormals.h). Operations are basic ones, whose results IEEE 754 fixes; none is an estimate.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weights/matrix.h"

namespace outpace {

// Raised with every change that alters a bit of an answer: what was recorded with another number may differ in its last bits.
// tests/integration/golden.json is then made anew.
constexpr int kArithmetic = 2;

enum class Activation { Silu, GeluTanh, ClampedSilu, Sigmoid, Relu };  // ClampedSilu: see gate in elementwise.h

enum class KVType { BF16, F16, F32, I8, I4 };  // of keys and values; I8 and I4 with scales, see kv_integers.h

constexpr int kBlock = 64;       // positions of a KV block: sums over keys are formed block by block
constexpr int kMaxQueries = 32;  // query vectors of one attention job
constexpr int kMaxHead = 576;    // largest head, padded to 16
constexpr int kMaxGroups = kMaxHead / 32;
constexpr int kStateColumns = 32;  // of a tile of a recurrent state

constexpr bool integers(KVType type) { return type == KVType::I8 || type == KVType::I4; }
constexpr int element_bytes(KVType type) { return type == KVType::F32 ? 4 : type == KVType::I8 ? 1 : 2; }  // not of I4
// Bytes of one key or value without its scales.
constexpr int kv_row_bytes(KVType type, int dim_padded) {
    return type == KVType::I4 ? (dim_padded + 31) / 32 * 16 : dim_padded * element_bytes(type);
}
// Dimensions that share a scale, and the bytes of one.
constexpr int group_dims(KVType type, int dim_padded) { return type == KVType::I4 ? 32 : dim_padded; }
constexpr int scale_bytes(KVType type) { return type == KVType::I4 ? 2 : 4; }
constexpr int groups(KVType type, int dim_padded) {
    return integers(type) ? (dim_padded + group_dims(type, dim_padded) - 1) / group_dims(type, dim_padded) : 0;
}
// Where byte i of a slot's integers stands in a block's keys or values.
constexpr size_t integer_at(bool key, int slot, int i, int row_bytes) {
    const int lane = slot % 16, at = i % 16;
    const int in_unit = key ? 64 * (at / 4) + 4 * lane + at % 4 : 64 * (lane / 4) + 4 * at + lane % 4;
    return static_cast<size_t>(slot / 16 * 16 * row_bytes + 256 * (i / 16) + in_unit);
}
// Bytes of one layer's and head's keys (or values) in a block.
constexpr size_t part_bytes(KVType type, int dim_padded) {
    return static_cast<size_t>(kBlock) * static_cast<size_t>(kv_row_bytes(type, dim_padded) + groups(type, dim_padded) * scale_bytes(type));
}

// Query vectors that share one KV head of one row.
struct AttentionJob {
    int queries;
    const float* q[kMaxQueries];      // [dim], scaled and rotated
    float* out[kMaxQueries];          // [value_padded]
    int position[kMaxQueries];        // of the query
    int first[kMaxQueries];           // first visible position (sliding window), else 0
    const int32_t* path[kMaxQueries]; // slots of positions cached, cached + 1, ... (a tree's ancestors and the query
                                      // itself), or null: the slot is the position
    bool sinks;                       // whether each query's softmax has one logit more, which has no value
    float sink[kMaxQueries];
    float cap;                        // scores are kept within it, softly; 0: they are not
    int cached;                       // positions below this stand in their own slots
    const uint8_t* const* blocks;     // KV blocks of the row
    size_t keys, values;              // offsets of this layer's and head's keys and values in a block
    int dim, dim_padded;              // of queries and keys; padded to 16
    int value_padded;                 // of values
    KVType type;
    int block_begin, block_end;       // the job's share of the blocks
    const uint8_t* upcoming;          // keys that this thread will need next: worth fetching, never read here
    // Null: the job has all blocks and writes `out`. Else the block's peak, total and, from [16], its weighted values go
    // to parts[query] + block * part_stride, for `merge_parts`.
    float* parts[kMaxQueries];  // null for all queries or for none
    int part_stride;
};

// What a token does to a tile [rows][kStateColumns] of a value head's state S: S becomes decay * S + key update', where
// update = beta * (value - decay * S'key); out = S'query of that.
struct DeltaToken {
    const float *key, *query;  // [rows]
    const float* value;        // [kStateColumns], as are the next two
    float *update, *out;
    float beta, decay;
    float skip;  // in `scan_step`
};

// Argmax over [n]; the first index on ties; `nan` when any value is NaN.
struct Best {
    float value;
    int index;
    bool nan;
};

// y[t * ldy + row] for the rows of row blocks [begin, end) and tokens [0, n). `acts` is [groups][n] records.
using MatmulKernel = void (*)(const Matrix& w, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy);

struct Kernels {
    const char* name;

    MatmulKernel matmul;

    // The rule for sums of products of bfloat16, which all that multiplies such pairs follows: the odd (upper) element first,
    // fma(a[0], b[0], fma(a[1], b[1], c)), each rounded once and with denormals as zero. 16 lanes, for tests.
    void (*dot_pairs)(const uint32_t* a, const uint32_t* b, const float* c, float* out);

    // Encodes groups [begin, end) of token t of n; x points at group `begin`'s first value.
    void (*encode)(Acts acts, const float* x, int begin, int end, uint8_t* dst, int n, int t);

    // out = x / sqrt(mean(x^2) + eps) * w over [n]; out may be x.
    void (*rmsnorm)(const float* x, const float* w, float eps, int n, float* out);

    void (*add)(float* x, const float* y, int n);  // x += y

    // Rotates pairs (i, i + half) of x [2 * half] by the angles whose cosines and sines [half] are given, times scale.
    void (*rotate)(float* x, const float* cosines, const float* sines, int half, float scale);

    // out = activation(gate) * up over [n], n a multiple of 16.
    void (*gate)(Activation activation, const float* gate, const float* up, int n, float* out);

    void (*cap)(float* x, int n, float limit);  // x = limit * tanh(x / limit), n a multiple of 16

    void (*attention)(const AttentionJob& job);
    void (*merge_parts)(const AttentionJob& job);

    // Recurrent layers; see delta.h. `to` may be `from`.
    void (*convolve)(const float* const* x, const float* w, const float* bias, int stride, int taps, int n, bool activated, float* out);
    void (*delta_replay)(const float* from, const float* key, const float* update, float decay, int rows, float* to);
    void (*delta_step)(const DeltaToken& token, const float* from, int rows, float* to);
    // The same with update = beta * value, and skip * value added to `out`.
    void (*scan_step)(const DeltaToken& token, const float* from, int rows, float* to);

    // Copies one key or value [dim] into its slot (0 .. kBlock - 1) of a block's keys or values.
    void (*put_key)(const float* k, int dim, int dim_padded, KVType type, uint8_t* keys, int slot);
    void (*put_value)(const float* v, int dim, int dim_padded, KVType type, uint8_t* values, int slot);

    Best (*argmax)(const float* x, int n);

    // What a choice needs of the whole vocabulary; see sampling.h.
    int (*at_least)(const float* x, int first, int n, float threshold, int32_t* ids);
    void (*weigh)(const float* x, int n, double temperature, double top, double* weights);
    int (*gumbel_survivors)(const float* x, int first, int n, float inverse_temperature, float best, uint64_t key, uint32_t index,
        uint32_t sample, uint32_t stream, int32_t* ids);
    int (*gumbel_survivors_of)(const float* x, const int32_t* tokens, int n, float inverse_temperature, float best, uint64_t key,
        uint32_t index, uint32_t sample, uint32_t stream, int32_t* places);
};

// Those that paths.cmake could build and was to build, by OUTPACE_HAS_...
const Kernels& kernels_portable();
const Kernels& kernels_portablefma();
const Kernels& kernels_avx2();
const Kernels& kernels_avx2vnni();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512bf16();
const Kernels& kernels_avx512amx();
const Kernels& kernels_neon();
const Kernels& kernels_neoni8mm();
const Kernels& kernels_avx512amxemulated();  // tiles in plain C++, for tests; always from one token

// From how many tokens products of a format (its number) go through tiles. Set before the first forward, see runtime/amx.h.
struct TileWidths {
    int from[32];
};
TileWidths& tile_widths();
TileWidths& emulated_tile_widths();

}  // namespace outpace
