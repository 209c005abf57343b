// Keys and values of rows, in blocks of 64 positions that are never moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "weights/matrix.h"

namespace outpace {

struct MemoryLimit : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct KVShape {
    int layers, heads, dim;
    bool f32;
    int dim_padded() const { return round_up(dim, 16); }
    // Bytes of one layer's and head's keys (or values) in a block.
    size_t part() const { return static_cast<size_t>(kBlock) * dim_padded() * (f32 ? 4 : 2); }
    size_t keys(int layer, int head) const { return (static_cast<size_t>(layer) * heads + head) * 2 * part(); }
    size_t values(int layer, int head) const { return keys(layer, head) + part(); }
    size_t block() const { return static_cast<size_t>(layers) * heads * 2 * part(); }
};

// Rows reserve their blocks when they are allocated and take them up as they grow; freed blocks are kept for the next
// row, never beyond what is or was reserved at once. Not thread-safe: the model's lock guards it.
class KV {
public:
    KV(KVShape shape, int64_t limit);  // limit in bytes, < 0: none
    ~KV();
    KV(const KV&) = delete;
    KV& operator=(const KV&) = delete;

    int alloc(int64_t capacity);  // throws MemoryLimit
    void free(int row);
    int length(int row) const { return at(row).length; }
    int capacity(int row) const { return at(row).capacity; }
    void truncate(int row, int n);
    void compact(int row, int start, const int32_t* keep, int n);
    void fork(int src, int dst, int n);
    int64_t bytes_for(int64_t capacity) const;
    int64_t bytes() const { return reserved_ * static_cast<int64_t>(shape_.block()); }
    int64_t held() const { return static_cast<int64_t>(total_) * static_cast<int64_t>(shape_.block()); }
    int64_t limit() const { return limit_; }
    std::vector<int> rows() const;
    void check() const;
    const KVShape& shape() const { return shape_; }

    // Makes room for `n` more positions (within the capacity) and returns the row's blocks.
    const uint8_t* const* grow(int row, int n);
    uint8_t* block_of(int row, int slot) { return rows_[static_cast<size_t>(row)].blocks[static_cast<size_t>(slot / kBlock)]; }
    void lengthen(int row, int n) { at(row).length += n; }
    // Overwrites every slot that is not in use with NaN. For tests: nothing may ever read them.
    void poison();

private:
    struct Row {
        bool used = false;
        int length = 0, capacity = 0;
        std::vector<uint8_t*> blocks;
    };
    const Row& at(int row) const;
    Row& at(int row) { return const_cast<Row&>(static_cast<const KV*>(this)->at(row)); }
    void move_slot(Row& row, int from, int to);

    const KVShape shape_;
    const int64_t limit_;
    int64_t reserved_ = 0;  // blocks
    size_t total_ = 0;      // blocks that exist
    std::vector<Row> rows_;
    std::vector<uint8_t*> spare_;
};

}  // namespace outpace
