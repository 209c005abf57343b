// Learned drafters of native steps: what their networks have read of each row, and what they draft from it. Rows whose
// rules forbid tokens, and those that sample under rejection, are drafted for in Python (drafters/learned), from the same rows.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "drafting/drafter.h"
#include "model/eagle.h"
#include "model/medusa.h"
#include "model/parallel.h"

namespace outpace {

// What a network has read of rows, and what it has still to read. Entry i of a row has the target's hidden states of position i
// and the token after it, i + 1. An entry whose hidden states never came is left out. Python's drafters count with it, too.
class Entries {
public:
    struct Row {
        std::vector<int> at;  // entries that are known, ascending
        int read = 0;         // how many of them the network has
        // Of the last entries: those that it lacks, and maybe the last one that it has.
        std::vector<int32_t> tokens;
        std::vector<float> states;

        int kept() const { return static_cast<int>(tokens.size()); }
        int waiting() const { return static_cast<int>(at.size()) - read; }
        int had() const { return kept() - waiting(); }
        int end() const { return at.empty() ? 0 : at.back() + 1; }
        const int* unread_at() const { return at.data() + read; }
        const int32_t* unread_tokens() const { return tokens.data() + had(); }
    };

    // `wide`: numbers of an entry's hidden states; 0: they lie elsewhere.
    explicit Entries(size_t wide) : wide_(wide) {}

    Row* find(int64_t row) {
        const auto found = rows_.find(row);
        return found == rows_.end() ? nullptr : &found->second;
    }
    Row& made(int64_t row) { return rows_[row]; }  // where it is not there
    // Makes room for an entry behind the row's last one: where its states go.
    float* append(Row& row, int entry, int32_t token);
    const float* unread_states(const Row& row) const { return row.states.data() + static_cast<size_t>(row.had()) * wide_; }
    void has_read(Row& row, int n);  // the network has the first n that were unread now; the last of them is kept
    bool unread_last(Row& row);      // makes the last entry unread again; whether that can be done
    void fork(int64_t src, int64_t dst, int before);  // `dst` becomes what `src` has of the entries before `before`
    void retire(Row& row) { drop(row, row.had()); }   // the last entry that the network has need not be kept
    void release(int64_t row) { rows_.erase(row); }
    const std::map<int64_t, Row>& rows() const { return rows_; }
    size_t wide() const { return wide_; }

private:
    void drop(Row& row, int n);

    const size_t wide_;
    std::map<int64_t, Row> rows_;
};

// A network's rows, and how they are drafted for: drafters/learned/drafter.py is the reference. It reads hidden states of the
// target's layers `order`, as the network wants them.
class LearnedRows : public NativeDrafter {
public:
    // Where more than `wait` entries of a row are unread, all but `left` are read, in calls of at most `piece`. Those from `most`
    // on are left out.
    struct Reading {
        int wait, left, piece, most;
    };

    const std::vector<int>& hidden_layers() const override { return ascending_; }
    size_t width() const { return order_.size(); }  // layers that an entry has
    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    bool observe(const std::vector<Final>& rows, const States& states) override;
    void read_ahead() override;
    Entries& entries() { return entries_; }

protected:
    struct Wanted {
        const Asked& asked;
        const Entries::Row& known;
        int levels;
    };
    using Part = std::pair<int64_t, int>;  // a row, and how many of its unread entries

    // `network`: has keys and values of rows; null: it has none, and of a row the last entry alone counts. Throws
    // std::invalid_argument where the layers are not `count`.
    LearnedRows(std::vector<int> order, int count, size_t hidden, DraftNetwork* network, Reading reading);

    virtual int levels(const Asked& asked) const = 0;                           // of the row's draft, if it can have one
    virtual bool fits(const Asked& asked, const Entries::Row& known, int levels) const = 0;  // whether it can
    virtual void read(const std::vector<Part>& parts) = 0;                      // throws MemoryLimit
    virtual std::vector<Draft> draft(const std::vector<Wanted>& rows) = 0;      // reads what is unread first; throws MemoryLimit

    Entries entries_;

private:
    void copy(const States& from, int place, float* to) const;
    Entries::Row& settled(int64_t row);
    bool ready(const Asked& asked);
    void forget(int64_t row);

    const std::vector<int> order_;
    std::vector<int> ascending_;  // each once
    const size_t hidden_;
    DraftNetwork* const network_;
    const Reading reading_;
    std::vector<int64_t> behind_;  // rows that are to be read ahead
};

// What a row's next token is chosen by, its rules apart.
inline Sampling sampling_of(const Asked& asked) {
    if (!asked.sampling) return {};
    Sampling sampling = *asked.sampling;
    sampling.index = static_cast<uint32_t>(static_cast<int64_t>(asked.n) - asked.prompt);
    return sampling;
}

class EagleRows : public LearnedRows {
public:
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
    bool stepwise() const override { return !eagle_.masked(); }

private:
    int levels(const Asked& asked) const override;
    bool fits(const Asked&, const Entries::Row& known, int levels) const override {
        return known.waiting() > 0 && static_cast<int>(known.at.size()) + levels <= limits_.max_length;
    }
    void read(const std::vector<Part>& parts) override;
    std::vector<Draft> draft(const std::vector<Wanted>& rows) override;

    Eagle& eagle_;
    const Limits limits_;
};

class ParallelRows : public LearnedRows {
public:
    // `network` outlives this. `layers`: of the target, in the network's order. `max_length`: positions that it knows.
    ParallelRows(Parallel& network, std::vector<int> layers, int branch, int most_levels, int max_length);

private:
    int levels(const Asked& asked) const override { return std::min(asked.depth(), most_levels_); }
    bool fits(const Asked& asked, const Entries::Row& known, int levels) const override {
        return known.end() > 0 && asked.n + static_cast<size_t>(levels) <= static_cast<size_t>(max_length_);
    }
    void read(const std::vector<Part>& parts) override;
    std::vector<Draft> draft(const std::vector<Wanted>& rows) override;

    Parallel& network_;
    const int branch_, most_levels_, max_length_;
};

class MedusaRows : public LearnedRows {
public:
    struct Node {    // of a static tree
        int parent;  // before it in the tree; -1: the pending token
        int head, rank;
    };
    // `network` outlives this. `layer`: the target's last.
    MedusaRows(Medusa& network, int layer, std::vector<Node> tree);

private:
    int levels(const Asked& asked) const override { return std::min(asked.depth(), network_.heads()); }
    bool fits(const Asked& asked, const Entries::Row& known, int) const override { return known.end() == static_cast<int>(asked.n) - 1; }
    void read(const std::vector<Part>&) override {}
    std::vector<Draft> draft(const std::vector<Wanted>& rows) override;

    Medusa& network_;
    const std::vector<Node> tree_;
    int ranks_ = 1;  // candidates of a head
};

}  // namespace outpace
