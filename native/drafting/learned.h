// Learned drafters of native steps: what they have read of each row, and what they draft from it. Rows whose
// rules forbid tokens, and those that sample under rejection, are drafted for in Python (drafters/learned), from the same rows.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "drafting/lookups.h"
#include "model/eagle.h"
#include "model/medusa.h"
#include "model/parallel.h"

namespace outpace {

// Reads hidden states of the target's layers `order`, as the network wants them.
class LearnedRows : public NativeDrafter {
public:
    const std::vector<int>& hidden_layers() const override { return ascending_; }
    size_t width() const { return order_.size(); }  // layers that a position has

protected:
    // Throws std::invalid_argument where they are not `count`.
    LearnedRows(std::vector<int> order, int count);
    // Copies [width][hidden] of states at `place` among those of `from`. Throws std::invalid_argument where a layer is missing.
    void copy(const States& from, int place, size_t hidden, float* to) const;

private:
    const std::vector<int> order_;
    std::vector<int> ascending_;  // each once
};

// What a row's next token is chosen by, its rules apart.
inline Sampling sampling_of(const Asked& asked) {
    if (!asked.sampling) return {};
    Sampling sampling = *asked.sampling;
    sampling.index = static_cast<uint32_t>(static_cast<int64_t>(asked.n) - asked.prompt);
    return sampling;
}

// Entry i of a row has the target's hidden states of position i and the token after it; drafters/learned/entries.py is the reference.
class EagleRows : public LearnedRows {
public:
    struct Row {
        std::vector<std::pair<int, int>> spans;  // entries that the network has, [first, end), ascending
        // Those whose hidden states are kept, ascending: the last one that the network has, if `had`, then all that it lacks.
        std::vector<int> at;
        std::vector<int32_t> tokens;
        std::vector<float> states;
        bool had = false;

        int read() const {
            int sum = 0;
            for (const auto& [first, end] : spans) sum += end - first;
            return sum;
        }
        int waiting() const { return static_cast<int>(at.size()) - had; }
        int end() const { return waiting() > 0 ? at.back() + 1 : spans.empty() ? 0 : spans.back().second; }
        const int32_t* unread_tokens() const { return tokens.data() + had; }
    };
    struct Limits {
        int branch;
        int most_levels;   // of a draft; -1: as many as it is asked for, but
        int fixed_levels;  // for a tree of fixed size
        int deepest;       // for a draft that stops at a floor
        int catch_up;      // entries of a row that wait unread, and that one call feeds
        int max_length;    // entries of a row
    };
    // `eagle` outlives this. `layers`: of the target, in the network's order.
    EagleRows(Eagle& eagle, std::vector<int> layers, Limits limits);

    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    bool stepwise() const override { return true; }
    bool observe(const std::vector<Final>& rows, const States& states) override;
    void read_ahead() override;

    Row* find(int64_t row) {
        const auto found = rows_.find(row);
        return found == rows_.end() ? nullptr : &found->second;
    }
    Row& made(int64_t row) { return rows_[row]; }  // where it is not there
    // Makes room for an entry behind the row's last one: where its states go.
    float* append(int64_t row, int entry, int32_t token);
    const float* unread_states(const Row& row) const { return row.states.data() + row.had * wide(); }
    void has_read(Row& row, int n);  // the network has the first n that were unread now
    bool unread_last(Row& row);      // makes the last entry unread again; whether that can be done
    void fork(int64_t src, int64_t dst, int known);  // `dst` becomes what `src` has of the entries before `known`
    void retire(int64_t row);                        // the last entry need not be kept
    void release(int64_t row) { rows_.erase(row); }
    const std::map<int64_t, Row>& rows() const { return rows_; }
    size_t wide() const { return eagle_.wide(); }  // numbers of an entry's hidden states

private:
    int levels(const Asked& asked) const;
    bool ready(int64_t row, int more);
    Row& settled(int64_t row);
    void drop(Row& row, int n);
    void forget(int64_t row);

    Eagle& eagle_;
    const Limits limits_;
    std::map<int64_t, Row> rows_;
    std::vector<int64_t> behind_;  // rows that are to be read ahead
};

class ParallelRows : public LearnedRows {
public:
    // `network` outlives this. `layers`: of the target, in the network's order. `max_length`: positions that it knows.
    ParallelRows(Parallel& network, std::vector<int> layers, int max_length);

    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    bool observe(const std::vector<Final>& rows, const States& states) override;
    void read_ahead() override;

    // Hidden states [n][layers][hidden] at positions that ascend beyond the row's last one.
    struct Read {
        int64_t row;
        std::vector<int32_t> positions;
        std::vector<float> states;
    };
    // Appends them to rows, each once at the most, which are made where they are not there. Throws as Parallel::read does, and
    // then every row is as it was.
    void read(const std::vector<Read>& rows);
    int end(int64_t row) const {  // the position after the row's last one; 0 for a row that is not there
        const auto found = positions_.find(row);
        return found == positions_.end() ? 0 : found->second.back() + 1;
    }
    // `dst`, which is not there, begins with what `src` has of positions below `end`. Throws MemoryLimit.
    void fork(int64_t src, int64_t dst, int end);
    void release(int64_t row);
    Parallel& network() { return network_; }
    const std::map<int64_t, std::vector<int32_t>>& positions() const { return positions_; }

private:
    Parallel& network_;
    const int max_length_;
    std::map<int64_t, std::vector<int32_t>> positions_;  // of each row's contexts, ascending
    std::vector<Read> waiting_;                          // for `read_ahead`
};

class MedusaRows : public LearnedRows {
public:
    struct Node {    // of a static tree
        int parent;  // before it in the tree; -1: the pending token
        int head, rank;
    };
    struct State {
        int position = -1;          // of the pending token
        std::vector<float> values;  // the last layer's before it [hidden]
    };
    // `network` outlives this. `layer`: the target's last.
    MedusaRows(Medusa& network, int layer, std::vector<Node> tree);

    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    bool observe(const std::vector<Final>& rows, const States& states) override;

    Medusa& network() { return network_; }
    std::map<int64_t, State>& states() { return states_; }

private:
    Medusa& network_;
    const std::vector<Node> tree_;
    int ranks_ = 1;  // candidates of a head
    std::map<int64_t, State> states_;
};

}  // namespace outpace
