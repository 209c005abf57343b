// From a model file's bytes to the kernels' layout, and back for looking up embeddings and for tests.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "weights/matrix.h"

namespace outpace {

// Numbers as GGUF files count them.
enum class Source : int {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ4_XS = 23,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    Q1_0 = 41
};

// What a file's matrices can be of. A test holds names and sizes against models/formats/gguf.py.
struct SourceType {
    Source id;
    const char* name;
    int values, bytes;  // of a block
    Format kept;        // the format that changes no value
};
constexpr SourceType kSources[] = {
    {Source::F32, "F32", 1, 4, Format::F32},
    {Source::F16, "F16", 1, 2, Format::H16},
    {Source::BF16, "BF16", 1, 2, Format::B16},
    {Source::Q4_0, "Q4_0", 32, 18, Format::I4S},
    {Source::Q4_1, "Q4_1", 32, 20, Format::I4M},
    {Source::Q5_0, "Q5_0", 32, 22, Format::I5S},
    {Source::Q5_1, "Q5_1", 32, 24, Format::I5M},
    {Source::Q8_0, "Q8_0", 32, 34, Format::I8S},
    {Source::Q4_K, "Q4_K", 256, 144, Format::K4},
    {Source::Q5_K, "Q5_K", 256, 176, Format::K5},
    {Source::Q6_K, "Q6_K", 256, 210, Format::K6},
    {Source::IQ4_NL, "IQ4_NL", 32, 18, Format::I4C},
    {Source::IQ4_XS, "IQ4_XS", 256, 136, Format::K4C},
    // Without kernels of their own: every value of theirs is one of a wider format.
    {Source::Q3_K, "Q3_K", 256, 110, Format::K6},
    {Source::IQ3_S, "IQ3_S", 256, 110, Format::K6},
    {Source::TQ1_0, "TQ1_0", 256, 54, Format::I4S},
    {Source::TQ2_0, "TQ2_0", 256, 66, Format::I4S},
    {Source::MXFP4, "MXFP4", 32, 17, Format::I5S},
    {Source::Q1_0, "Q1_0", 128, 18, Format::I4S},
};

// Keep: no value changes. The others apply to F32, F16 and BF16 sources only.
enum class Target { Keep, B16, F16, F32, Int8, Int4 };
constexpr const char* kTargetNames[] = {"keep", "bf16", "f16", "f32", "int8", "int4"};

// Bytes of one row of `cols` values. Throws std::invalid_argument for an unknown type or cols that do not fit it.
size_t row_bytes(int source, int64_t cols);

// Bytes that a matrix [rows, cols] takes once it is packed. Throws as `pack` does for its type and target.
size_t packed_bytes(int source, int rows, int cols, Target target);

// work(i) for each i below `count`, claimed by so many threads.
template <class Work>
void shared_out(size_t count, int threads, const Work& work) {
    std::atomic<size_t> next{0};
    const auto claim = [&] {
        for (size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
    };
    std::vector<std::thread> helpers;
    try {
        for (int i = 1; i < threads && static_cast<size_t>(i) < count; ++i) helpers.emplace_back(claim);
    } catch (const std::system_error&) {  // fewer threads do it, too
    }
    claim();
    for (std::thread& helper : helpers) helper.join();
}

// Memory for weights: few large mappings on huge pages where the system has them.
class Arena {
public:
    // `bytes` rounded up to 64, zeroed; the returned pointer keeps its mapping alive.
    std::shared_ptr<uint8_t> take(size_t bytes);

    // A matrix of zeros, and where its bytes are.
    Matrix matrix(Format format, int rows, int cols, uint8_t*& bytes);

private:
    std::shared_ptr<uint8_t> mapping_;
    size_t used_ = 0, size_ = 0;
};

// Packs [rows, cols]. `data` has rows * row_bytes(source, cols) bytes (the caller has checked). `heads` > 0: within each
// of that many equal runs of rows, row 2 i + j of the file is row j * half + i of the result: the order in which GGUF
// keeps query and key rows of Llama models, undone, so that there is one kind of rotation.
Matrix pack(Arena& arena, const uint8_t* data, int source, int rows, int cols, int heads, Target target, int threads);

// Rows `ids` [n] of a matrix, each value and scale as it is. The caller has checked ids.
Matrix gather(Arena& arena, const Matrix& m, const int32_t* ids, int n);

// One row as float32 [cols].
void unpack_row(const Matrix& m, int row, float* out);

}  // namespace outpace
