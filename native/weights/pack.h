// From a model file's bytes to the kernels' layout, and back for looking up embeddings and for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weights/matrix.h"

namespace outpace {

// Numbers as GGUF files count them.
enum class Source : int {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30
};

// Keep: no value changes. The others apply to F32, F16 and BF16 sources only.
enum class Target { Keep, B16, F32, Int8, Int4 };

// Bytes of one row of `cols` values. Throws std::invalid_argument for an unknown type or cols that do not fit it.
size_t row_bytes(int source, int64_t cols);

// Memory for weights: few large mappings on huge pages where the system has them.
class Arena {
public:
    // `bytes` rounded up to 64, zeroed; the returned pointer keeps its mapping alive.
    std::shared_ptr<uint8_t> take(size_t bytes);

private:
    std::shared_ptr<uint8_t> mapping_;
    size_t used_ = 0, size_ = 0;
};

// Packs [rows, cols]. `data` has rows * row_bytes(source, cols) bytes (the caller has checked). `heads` > 0: within each
// of that many equal runs of rows, row 2 i + j of the file is row j * half + i of the result: the order in which GGUF
// keeps query and key rows of Llama models, undone, so that there is one kind of rotation.
Matrix pack(Arena& arena, const uint8_t* data, int source, int rows, int cols, int heads, Target target, int threads);

// One row as float32 [cols].
void unpack_row(const Matrix& m, int row, float* out);

}  // namespace outpace
