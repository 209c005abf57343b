// The tokens of one forward: where each one's keys and values go, and which others it sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/kv.h"

namespace outpace {

class Plan {
public:
    struct Row {     // of the cache, as it is when its tokens are planned
        int row;
        int cached;  // entries that all of its tokens see
        int blocks;  // the first of its blocks in Plan's list
        int windowed;  // the same of those of windowed layers
    };
    struct Token {
        int id, row, position;
        int turn;    // what its queries and keys are rotated by: its position, but in a drafter's block
        int slot;    // where its keys and values go in the row
        int cached, blocks, windowed;  // as in Row
        int path = -1;       // where the slots that it sees from `cached` on, its own last, begin in Plan's list; -1: they are positions
        int wanted = -1;     // index among the wanted, or -1
    };

    void clear() { tokens_.clear(), paths_.clear(), blocks_.clear(), end_ = 0; }
    // As clear, but rows stay known.
    void clear_tokens() { tokens_.clear(), paths_.clear(); }

    // A row whose memory has been taken. `cached`: entries that its next tokens all see.
    Row row(const KV& kv, int row, int cached) {
        const auto listed = [&](int pool) {
            const int first = static_cast<int>(blocks_.size());
            for (int i = 0; i < kv.blocks_of(row, pool); ++i) blocks_.push_back(kv.block_of(row, pool, i));
            return first;
        };
        const int full = listed(kFull);
        return {row, cached, full, listed(kWindowed)};
    }
    // A token behind all others of its row: it sees every slot before its own.
    Token& append(const Row& row, int id, int at) { return add({id, row.row, at, at, at, row.cached, row.blocks, row.windowed}); }
    // A tree's node in a slot of its own. `path(slots)` appends the slots of its ancestors from row.cached on, and its own.
    template <class Path>
    Token& node(const Row& row, int id, int position, int slot, const Path& path) {
        Token& token = add({id, row.row, position, position, slot, row.cached, row.blocks, row.windowed});
        // A node is in the slot of its position exactly when its ancestors are the nodes before it, one a depth.
        if (position != slot) {
            token.path = static_cast<int>(paths_.size());
            path(paths_);
        }
        return token;
    }
    // One of a block whose last slot is `last`: all of them see each other. Its keys turn by another number than its place.
    Token& in_block(const Row& row, int id, int turn, int slot, int last) {
        return add({id, row.row, last, turn, slot, row.cached, row.blocks, row.windowed});
    }

    int size() const { return static_cast<int>(tokens_.size()); }
    const Token& operator[](int i) const { return tokens_[static_cast<size_t>(i)]; }
    const uint8_t* const* blocks(const Token& token, int pool) const {
        return blocks_.data() + (pool == kWindowed ? token.windowed : token.blocks);
    }
    const int32_t* path(const Token& token) const { return token.path < 0 ? nullptr : paths_.data() + token.path; }
    int end() const { return end_; }  // after the last number that keys turn by

private:
    Token& add(const Token& token) {
        end_ = std::max(end_, token.turn + 1);
        tokens_.push_back(token);
        return tokens_.back();
    }

    std::vector<Token> tokens_;
    std::vector<int32_t> paths_;
    std::vector<const uint8_t*> blocks_;  // of rows, row after row
    int end_ = 0;
};

}  // namespace outpace
