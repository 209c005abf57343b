// A drafter's network takes the weights of another while rows are under way.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "model/eagle.h"

namespace outpace {
namespace {

// Rows of another cache in this empty one, with the same blocks shared between them. `moved`: row there -> row here.
void copy_rows(const KV& from, KV& to, std::map<int, int>& moved) {
    for (const int row : from.rows()) {
        const int n = from.length(row), blocks = from.blocks_of(row), made = to.alloc();
        int best = -1, shared = 0;
        for (const auto& [other, there] : moved) {
            int same = 0;
            while (same < std::min(blocks, from.blocks_of(other)) && from.block_of(row, same) == from.block_of(other, same)) ++same;
            const bool whole = same == blocks && n <= from.length(other);  // a last block that is not full is shared by rows as long
            const int positions = whole ? n : std::min(same, std::min(n, from.length(other)) / kBlock) * kBlock;
            if (positions > shared) best = there, shared = positions;
        }
        moved[row] = made;
        if (best >= 0) to.fork(best, made, shared);
        to.grow({{made, n - shared}});
        to.lengthen(made, n - shared);
        for (int i = (shared + kBlock - 1) / kBlock; i < blocks; ++i)
            std::memcpy(const_cast<uint8_t*>(to.block_of(made, i)), from.block_of(row, i), from.shape().block());
    }
}

}  // namespace

void Eagle::exchange(Eagle& other) {
    Model &mine = *model_, &theirs = *other.model_;
    const Config &a = mine.config_, &b = theirs.config_;
    const KVShape &x = mine.kv_.shape(), &y = theirs.kv_.shape();
    if (&mine == &theirs || mine.runtime_ != theirs.runtime_ || !other.rows_.empty() || !theirs.kv_.rows().empty())
        throw std::invalid_argument("weights are exchanged with another network of this runtime that has no rows");
    if (a.vocab != b.vocab || a.hidden != b.hidden || a.heads != b.heads || a.ffn != b.ffn || a.max_length != b.max_length ||
        x.layers != y.layers || x.heads != y.heads || x.dim != y.dim || x.type != y.type || !fusion_.like(other.fusion_) ||
        tokens() != other.tokens() || norm_output_ != other.norm_output_)
        throw std::invalid_argument("the two networks differ in shape, or in the tokens that they know");
    std::lock_guard<std::mutex> lock(mine.lock());
    std::map<int, int> moved, rows;
    try {
        copy_rows(mine.kv_, theirs.kv_, moved);
        for (const auto& [of, row] : rows_) rows[of] = moved.at(row);
    } catch (...) {
        for (const auto& [row, made] : moved) theirs.kv_.free(made);
        throw;
    }
    for (const auto& [of, row] : rows_) mine.kv_.free(row);
    std::swap(model_, other.model_);
    std::swap(fusion_, other.fusion_);
    rows_.swap(rows);
}

}  // namespace outpace
