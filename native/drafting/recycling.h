// Token recycling (arXiv 2408.08696): for each token, the tokens that the target found likeliest after it when a forward last
// verified it. A tree is drafted by following these lists, best chance first.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "drafting/drafter.h"

namespace outpace {

class RecyclingLookup : public NativeDrafter {
public:
    // `capacity`: lists in all tables together. `hit[r]`: how often number r of a list was the next token; a list has as many.
    // `shared`: one table for all rows, which stays when they go; else each row has its own. Throws std::invalid_argument.
    RecyclingLookup(int64_t capacity, std::vector<double> hit, bool shared);

    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    int ranks() const override { return static_cast<int>(hit_.size()); }
    void rank(int64_t row, const int32_t* tokens, size_t n, const int32_t* ids) override;

    void release(int64_t row);
    int64_t lists() const;
    std::vector<int64_t> rows() const;                                // that have a table
    std::vector<int32_t> after(int64_t row, int32_t token) const;  // the token's list in the row's table

private:
    struct Table {
        std::unordered_map<int32_t, size_t> place;  // token -> number of its list
        std::vector<int32_t> ids;                   // [lists][ranks], best first; -1: none
    };
    const Table* find(int64_t row) const;
    const int32_t* list(const Table& table, int32_t token) const;  // null: there is none
    Draft draft(const Table& table, int32_t last, int budget) const;

    const int64_t capacity_;
    const std::vector<double> hit_;
    const bool shared_;
    std::map<int64_t, Table> tables_;  // by row, or of row 0 alone where it is shared
};

}  // namespace outpace
