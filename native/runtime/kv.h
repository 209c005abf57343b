// Keys and values of rows, in blocks of 64 positions that are never moved and that rows may share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "runtime/kv_arena.h"
#include "runtime/states.h"
#include "weights/matrix.h"

namespace outpace {

struct MemoryLimit : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Layers may differ in their heads; a block has them one after the other.
struct KVShape {
    struct Layer {
        int heads, dim, value_dim;
        size_t first;  // where its keys begin in a block
        int dim_padded() const { return round_up(dim, 16); }
        int value_padded() const { return round_up(value_dim, 16); }
    };
    KVType type;
    std::vector<Layer> layers = {};

    void add(int heads, int dim, int value_dim) { layers.push_back({heads, dim, value_dim, block()}); }
    const Layer& operator[](int layer) const { return layers[static_cast<size_t>(layer)]; }
    // Bytes of one head's keys and values in a block.
    size_t pair(int layer) const { return part_bytes(type, (*this)[layer].dim_padded()) + part_bytes(type, (*this)[layer].value_padded()); }
    size_t keys(int layer, int head) const { return (*this)[layer].first + static_cast<size_t>(head) * pair(layer); }
    size_t values(int layer, int head) const { return keys(layer, head) + part_bytes(type, (*this)[layer].dim_padded()); }
    size_t block() const {
        const int last = static_cast<int>(layers.size()) - 1;
        return last < 0 ? 0 : keys(last, layers.back().heads);
    }
};

// Rows take blocks as they grow and share them by reference: a row that is to write into a block which others have too
// gets its own copy first. Between two forwards a row has exactly the blocks that its length needs. Freed blocks are kept
// for the next row, never more than were once in use. Recurrent layers' states come and go with them (states.h), so that a
// row of a model that has such layers cannot be cut anywhere. Not thread-safe: the runtime's lock guards it.
class KV {
public:
    KV(KVShape shape, int64_t limit, StateShape states = {});  // limit in bytes, < 0: none

    int alloc();
    void free(int row);
    int length(int row) const { return at(row).length; }
    int reachable(int row, int n) const;  // the longest beginning of at most n positions that it can be cut or forked at
    void truncate(int row, int n);
    void compact(int row, int start, const int32_t* keep, int n);  // throws MemoryLimit where it would have to copy
    void fork(int src, int dst, int n);

    int64_t growth(int row, int64_t n) const;  // bytes for n more positions, with a copy of what is shared
    int64_t bytes_for(int64_t positions) const;
    int64_t exclusive(const std::vector<int>& rows) const;  // bytes that only these rows have
    int64_t bytes() const { return bytes_of(used_) + states_.bytes(); }
    int64_t held() const {
        return bytes_of(blocks_.size()) + states_.bytes() + states_.snapshot_bytes(true) + states_.spare_bytes();
    }  // with what is spare
    int64_t limit() const { return limit_; }
    std::vector<int> rows() const;
    void check() const;  // throws std::logic_error
    const KVShape& shape() const { return shape_; }
    void keep(int row) { states_.keep(row); }  // where the row is now can be reached when its prompt is read on
    RecurrentStates& states() { return states_; }
    const RecurrentStates& states() const { return states_; }

    struct Need {
        int row, positions;
    };
    // Gives each of these rows (all different) blocks of its own for so many more positions: to all of them, or throws
    // MemoryLimit or std::bad_alloc and has changed nothing.
    void grow(const std::vector<Need>& needs);
    void lengthen(int row, int n) { at(row).length += n; }
    // Gives back what rows have beyond their length, after a forward that failed between the two above.
    void settle();
    // What a file keeps of a row: a block's bytes as they lie in memory, zeros in slots beyond the row's length, and recurrent
    // states at the positions `state_ends`. A row that takes blocks can be used once it has taken its state, too.
    void export_block(int row, int i, uint8_t* to) const;
    void import_block(int row, const uint8_t* from, int n);  // of n positions, behind full ones; throws MemoryLimit
    std::vector<int> state_ends(int row) const { return at(row).awaits ? std::vector<int>{} : states_.ends(row); }
    void import_state(int row, const float* from);  // throws MemoryLimit
    int blocks_of(int row) const { return static_cast<int>(at(row).blocks.size()); }
    const uint8_t* block_of(int row, int i) const { return at(row).blocks[static_cast<size_t>(i)]->data; }

    // Overwrites every slot that no row uses with NaN. For tests: nothing may ever read them.
    void poison();

private:
    struct Block {
        uint8_t* data;
        int owners;  // rows that have it; 0: it is spare
    };
    struct Row {
        bool used = false;
        bool awaits = false;  // it has taken blocks of a file, and not yet its recurrent state
        int length = 0;
        std::vector<Block*> blocks;
    };
    const Row& at(int row) const;
    Row& at(int row) { return const_cast<Row&>(static_cast<const KV*>(this)->at(row)); }
    int64_t bytes_of(size_t blocks) const { return static_cast<int64_t>(blocks) * static_cast<int64_t>(shape_.block()); }
    std::vector<Block*> take(size_t count, const char* what, int64_t beside = 0);  // bytes that states will take
    bool recurrent() const { return states_.shape().layers > 0; }
    int checked(int row, int n, const char* what) const;
    void give(Block* block);
    void shrink(Row& row, int n);
    void own(Row& row, size_t i, Block* copy);
    void move_slot(Row& row, int from, int to);
    template <class F>
    void each_piece(int slot, const F& f) const;

    const KVShape shape_;
    const int64_t limit_;
    KVArena arena_;
    size_t used_ = 0;  // blocks that rows have
    RecurrentStates states_;
    std::vector<Row> rows_;
    std::vector<std::unique_ptr<Block>> blocks_;  // all that exist
    std::vector<Block*> spare_;
};

// Gives up what a call took for tokens of its own, however it ends.
struct Settled {
    KV& kv;
    ~Settled() { kv.settle(); }
};

}  // namespace outpace
