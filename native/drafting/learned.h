// EAGLE as a drafter of whole steps in C++: what drafters/learned/eagle.py does for rows that need no Python. That is the
// reference.
#pragma once

#include <vector>

#include "drafting/entries.h"
#include "drafting/lookups.h"
#include "model/eagle.h"

namespace outpace {

class EagleRows : public Lookup {
public:
    struct Limits {
        int branch;
        int most_levels;   // of a draft; -1: as many as it is asked for, but
        int fixed_levels;  // for a tree of fixed size
        int catch_up;      // entries of a row that wait unread, and that one call feeds
        int max_length;    // entries of a row
    };
    // `eagle` outlives this. `columns`: layers of the target in the network's order.
    EagleRows(Eagle& eagle, std::vector<int> columns, Limits limits);

    void propose(const std::vector<Asked>& rows, std::vector<SourcedTree>& trees) override;
    const std::vector<int>& taps() const override { return layers_; }
    bool stepwise() const override { return true; }
    bool observe(const std::vector<Final>& rows, const States& states) override;
    void read_ahead() override;

    Entries& entries() { return entries_; }
    const Entries& entries() const { return entries_; }
    size_t width() const { return columns_.size(); }  // layers that an entry has

private:
    int levels(const Asked& asked) const;
    bool ready(int64_t row, int more);
    Entries::Row& settled(int64_t row);
    void forget(int64_t row);
    std::vector<Eagle::Draft> draft(const std::vector<Eagle::Ask>& asks);

    Eagle& eagle_;
    const std::vector<int> columns_;
    std::vector<int> layers_;  // the same, ascending, each once
    const Limits limits_;
    Entries entries_;
    std::vector<int64_t> behind_;  // rows that are to be read ahead
};

}  // namespace outpace
