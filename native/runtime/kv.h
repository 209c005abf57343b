// Keys and values of rows, in blocks of 64 positions that are never moved and that rows may share.
//
// There are two pools of blocks: of the layers that see every position, and of those with a window, whose blocks rows give
// back when no window reaches them any more.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "runtime/kv_blocks.h"
#include "runtime/states.h"
#include "weights/matrix.h"

namespace outpace {

struct MemoryLimit : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr int kPools = 2;
constexpr int kFull = 0, kWindowed = 1;  // pools
constexpr int kBehind = 64;              // positions that a row with windows can be cut back by at least: more than a step drafts
constexpr int kKeptWindows = 16;         // kept beginnings take at most the memory of so many windows; the oldest goes first

// Layers may differ in their heads; a block has those of its pool one after the other.
struct KVShape {
    struct Layer {
        int heads, dim, value_dim, pool;
        size_t first;  // where its keys begin in a block
        int dim_padded() const { return round_up(dim, 16); }
        int value_padded() const { return round_up(value_dim, 16); }
    };
    KVType type;
    std::vector<Layer> layers = {};
    std::array<size_t, kPools> block = {};  // bytes of a block; 0: the pool has no layers
    int window = 0;  // positions that a token sees in windowed layers, at most, itself among them

    void add(int heads, int dim, int value_dim, int window_of_it = 0) {
        const int pool = window_of_it > 0 ? kWindowed : kFull;
        layers.push_back({heads, dim, value_dim, pool, block[static_cast<size_t>(pool)]});
        block[static_cast<size_t>(pool)] += static_cast<size_t>(heads) * pair(static_cast<int>(layers.size()) - 1);
        window = std::max(window, window_of_it);
    }
    const Layer& operator[](int layer) const { return layers[static_cast<size_t>(layer)]; }
    // Bytes of one head's keys and values in a block.
    size_t pair(int layer) const { return part_bytes(type, (*this)[layer].dim_padded()) + part_bytes(type, (*this)[layer].value_padded()); }
    size_t keys(int layer, int head) const { return (*this)[layer].first + static_cast<size_t>(head) * pair(layer); }
    size_t values(int layer, int head) const { return keys(layer, head) + part_bytes(type, (*this)[layer].dim_padded()); }
};

// Rows take blocks as they grow and share them by reference: a row that is to write into a block which others have too
// gets its own copy first. Between two forwards a row has exactly the blocks that its length needs; of windowed layers, those
// that a window of its last tokens reaches, the last forward's and kBehind more. Recurrent layers' states come and go with them
// (states.h). A row of a model that has such layers or windowed ones cannot be cut anywhere: `reachable` says where. Not
// thread-safe: the runtime's lock guards it.
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

    // Bytes for n more positions, of which the first so many settle as they are read, with a copy of what is shared.
    int64_t growth(int row, int64_t n, int64_t settled = 0) const;
    int64_t bytes_for(int64_t positions) const;
    int64_t exclusive(const std::vector<int>& rows) const;  // bytes that only these rows have
    int64_t bytes() const { return pools_[kFull].used() + pools_[kWindowed].used() + states_.bytes(); }
    int64_t held() const {
        return held_in_blocks() + states_.bytes() + states_.snapshot_bytes(true) + states_.spare_bytes();
    }  // with what is spare
    int64_t limit() const { return limit_; }
    std::vector<int> rows() const;
    void check() const;  // throws std::logic_error
    const KVShape& shape() const { return shape_; }
    void keep(int row);  // where the row is now can be reached when it has gone on, while there is memory for that
    bool windowed() const { return shape_.window > 0; }
    RecurrentStates& states() { return states_; }
    const RecurrentStates& states() const { return states_; }

    struct Need {
        int row, positions;
        int settled = 0;  // of these, the first so many never are taken back: recurrent states need no records of them
    };
    // Gives each of these rows (all different) blocks of its own for so many more positions: to all of them, or throws
    // MemoryLimit or std::bad_alloc and has changed nothing.
    void grow(const std::vector<Need>& needs);
    void lengthen(int row, int n) { at(row).length += n; }
    // Gives back what rows have beyond their length, after a forward that failed between the two above.
    void settle();
    // What a file keeps of a row: a block's bytes as they lie in memory, zeros in slots beyond the row's length, and recurrent
    // states at the positions `state_ends`. A row that takes blocks can be used once it has those of its window and its state.
    bool export_block(int row, int pool, int i, uint8_t* to) const;  // false: it has given the block back
    // Of n positions, behind full blocks; window: null where no window will reach them. Throws MemoryLimit.
    void import_block(int row, const uint8_t* from, const uint8_t* window, int n);
    std::vector<int> state_ends(int row) const { return at(row).awaits ? std::vector<int>{} : states_.ends(row); }
    void import_state(int row, const float* from);  // throws MemoryLimit
    int blocks_of(int row, int pool) const { return static_cast<int>(at(row).blocks[static_cast<size_t>(pool)].size()); }
    const uint8_t* block_of(int row, int pool, int i) const {  // null: given back
        const Block* block = at(row).blocks[static_cast<size_t>(pool)][static_cast<size_t>(i)];
        return block ? block->data : nullptr;
    }

    // Overwrites every slot that no row uses with NaN. For tests: nothing may ever read them.
    void poison();

private:
    using Block = KVBlock;
    using Counts = std::array<size_t, kPools>;
    struct Row {
        bool used = false;
        bool awaits = false;  // it has taken blocks of a file, and not yet all of its window or its recurrent state
        int length = 0;
        std::array<std::vector<Block*>, kPools> blocks;
        size_t first = 0;  // of the windowed ones that it has; those before are null
    };
    // The windowed blocks of a row's beginning, which the row itself may have given back.
    struct Kept {
        int row, end;  // positions
        size_t first;  // of the blocks, in a row
        std::vector<Block*> blocks;
    };
    const Row& at(int row) const;
    Row& at(int row) { return const_cast<Row&>(static_cast<const KV*>(this)->at(row)); }
    size_t blocks_for(int pool, int64_t positions) const {
        return shape_.block[static_cast<size_t>(pool)] > 0 ? static_cast<size_t>((positions + kBlock - 1) / kBlock) : 0;
    }
    // The first windowed block that the token after n positions sees.
    size_t first_seen(int n) const { return static_cast<size_t>(std::max(0, n - shape_.window + 1) / kBlock); }
    // The first that its next forward leaves it.
    size_t first_left(const Row& row) const { return windowed() ? std::max(row.first, first_seen(row.length - kBehind)) : 0; }
    int64_t held_in_blocks() const { return pools_[kFull].held() + pools_[kWindowed].held(); }
    void reserve(const Counts& counts, const char* what, int64_t beside = 0);  // bytes that states will take
    bool drop_kept();
    template <class F>
    void drop_kept_if(const F& f);
    std::deque<Kept>::const_iterator kept_at(int row, int n) const;
    int within_windows(int row, int n) const;
    bool has_window(const Row& row, int n) const { return !windowed() || row.first <= first_seen(n); }
    void pass(Row& row);
    void keep_windows(int row);
    bool recurrent() const { return states_.shape().layers > 0; }
    int checked(int row, int n, const char* what) const;
    void shrink(Row& row, int n);
    void copy(Row& row, int pool, size_t i);
    void move_slot(Row& row, int from, int to);
    template <class F>
    void each_piece(int pool, int slot, const F& f) const;

    const KVShape shape_;
    const int64_t limit_;
    std::array<KVBlocks, kPools> pools_;
    RecurrentStates states_;
    std::vector<Row> rows_;
    std::deque<Kept> kept_;  // the oldest first
};

// Gives up what a call took for tokens of its own, however it ends.
struct Settled {
    KV& kv;
    ~Settled() { kv.settle(); }
};

}  // namespace outpace
