// Recurrent states of rows, which can be cut back to any of the last few tokens without a copy of them.
//
// A row keeps its states at a base, a position, and of the tokens behind it what brings a state over them: the next forward
// replays those that are still there, with the operations that a token takes, so its bits are the same. A row can be cut to
// its base, to any position behind it, to 0, and to where a prompt ended that was read into it: of those states, snapshots are
// kept by reference, as many as there is room for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "kernels/table.h"

namespace outpace {

constexpr int kPending = 64;        // most tokens that a row keeps behind its base
constexpr int kLeastRoom = 8;       // tokens that there is room for at least
constexpr int kSnapshots = 16;      // states that snapshots keep at most; the oldest goes first
constexpr int kSnapshotEvery = 2048;  // positions between those of a prompt that takes several forwards

struct StateShape {
    int layers = 0;  // recurrent ones; 0: the model has none
    int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
    int taps = 0;  // of the convolution: a token's own inputs and those of the taps - 1 before it
    int width = 0;  // of a convolution that is all there is
    int keys() const { return key_heads * key_dim; }
    int values() const { return value_heads * value_dim; }
    int channels() const { return key_heads > 0 ? 2 * keys() + values() : width; }  // of the convolution: queries, keys, values
    size_t layer() const { return static_cast<size_t>(values()) * static_cast<size_t>(key_dim); }  // floats of a layer's states
    size_t state() const { return static_cast<size_t>(layers) * layer(); }
    int64_t bytes() const { return static_cast<int64_t>(state()) * 4; }
    int64_t token_bytes() const {  // of a token behind the base
        return int64_t{4} * layers * (channels() + keys() + values() + value_heads);
    }
};

// What is kept of tokens in a row. Each has records of all layers, one after the other.
class Window {
public:
    void fit(const StateShape& s, int count);
    int64_t bytes() const {
        return static_cast<int64_t>(sizeof(float) * (inputs_.capacity() + keys_.capacity() + updates_.capacity() + decays_.capacity()));
    }
    int count() const { return count_; }
    // Inputs of the convolution; the tokens before the first one are -1, -2 ...
    float* inputs(const StateShape& s, int layer, int token) { return record(inputs_, s, layer, s.taps - 1 + token, s.channels()); }
    float* keys(const StateShape& s, int layer, int token) { return record(keys_, s, layer, token, s.keys()); }
    float* updates(const StateShape& s, int layer, int token) { return record(updates_, s, layer, token, s.values()); }
    float* decays(const StateShape& s, int layer, int token) { return record(decays_, s, layer, token, s.value_heads); }
    float* before() { return inputs_.data(); }  // inputs of the tokens before the first one
    static size_t before_floats(const StateShape& s) {
        return static_cast<size_t>(s.taps - 1) * static_cast<size_t>(s.layers) * static_cast<size_t>(s.channels());
    }
    // Token `from` takes the place of token `to`, which comes before it.
    void move(const StateShape& s, int from, int to);

private:
    static float* record(std::vector<float>& all, const StateShape& s, int layer, int token, int width) {
        return all.data() +
               (static_cast<size_t>(token) * static_cast<size_t>(s.layers) + static_cast<size_t>(layer)) * static_cast<size_t>(width);
    }
    int count_ = 0;
    std::vector<float> inputs_, keys_, updates_, decays_;
};

// Not thread-safe: the runtime's lock guards it.
class RecurrentStates {
public:
    using State = std::shared_ptr<float[]>;  // [layers][value_heads][value_dim / kStateColumns][key_dim][kStateColumns]; null: zeros

    // A row's step over new tokens: it replays what it keeps, goes over `settled` tokens, and keeps the others.
    struct Step {
        int row;
        Window* window;  // what it keeps now
        const float* from;  // its states; null: zeros
        float* to;          // where those behind what is replayed and settled go; null: nothing is
        int settled, kept;
        std::shared_ptr<Window> next;
        State state;
    };

    explicit RecurrentStates(StateShape shape) : shape_(shape) {}
    const StateShape& shape() const { return shape_; }

    void clear(int row);                      // an empty row
    int reachable(int row, int n) const;      // the longest beginning of at most n positions that it can be cut to
    void truncate(int row, int n);            // to such a one
    void compact(int row, int start, const int32_t* keep, int n);  // its tokens from `start` on, which is reachable
    void fork(int src, int dst, int n);       // `n` is reachable
    void keep(int row);                       // what a prompt that has been read so far leaves stays when it is read on

    int64_t growth(int row, int64_t n, int64_t settled) const;  // bytes for n more positions, of which so many settle
    int64_t bytes_for(int64_t positions) const;
    int64_t exclusive(const std::vector<int>& rows) const;  // ascending
    int64_t bytes() const;  // of rows; snapshots make way for them, and do not count
    int64_t snapshot_bytes(bool alone) const;  // of the states that they keep; alone: of those that no row has
    int64_t spare_bytes() const;
    bool drop_snapshot();   // the oldest; false: there is none
    int length(int row) const;  // positions that its state is over
    std::vector<int> ends(int row) const;             // where its states can be given, ascending
    size_t given_floats() const { return shape_.state() + Window::before_floats(shape_); }
    void give(int row, int n, float* to) const;       // its states after n positions, one of `ends`, and the inputs before them
    void take(int row, int n, const float* from);     // such, for an empty row
    void check(int row, int positions) const;  // throws std::logic_error

    // May throw std::bad_alloc, and has changed nothing then; `end` takes up what the step has computed.
    Step begin(int row, int settled, int kept);
    void end(Step& step);
    int base(int row) const { return find(row) ? find(row)->base : 0; }
    int64_t fork_bytes(int src, int n) const;  // that `fork` takes

private:
    struct Row {
        int base = 0;
        State state;
        Window window;
        bool reads = false;  // its last step was over a prompt, after which it had a snapshot
    };
    struct Snapshot {
        int row, base;
        bool kept;  // it stays when the row reads on
        State state;
        Window window;  // without tokens
    };
    Row& at(int row) {
        if (static_cast<size_t>(row) >= rows_.size()) rows_.resize(static_cast<size_t>(row) + 1);
        return rows_[static_cast<size_t>(row)];
    }
    const Row* find(int row) const { return static_cast<size_t>(row) < rows_.size() ? &rows_[static_cast<size_t>(row)] : nullptr; }
    int64_t window_bytes(int64_t tokens) const {  // at most, once `fit`
        return (std::max<int64_t>(kLeastRoom, std::min<int64_t>(tokens, kPending)) + shape_.taps - 1) * shape_.token_bytes();
    }
    void snap(int row, bool kept = false);

    const StateShape shape_;
    int sharers(const Row& row) const;  // rows that have its state
    std::deque<Snapshot>::const_iterator at_most(int row, int n) const;  // its snapshot with the longest beginning of at most n

    std::deque<Row> rows_;  // a step points into them
    std::deque<Snapshot> snapshots_;
    std::vector<std::shared_ptr<Window>> spare_;
};

}  // namespace outpace
