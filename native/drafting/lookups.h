// The drafters that look tokens up, and compositions of drafters. Learned ones, which hear what became final, are in learned.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "drafting/datastore.h"
#include "drafting/merge.h"
#include "drafting/suffix.h"
#include "sampling/choose.h"

namespace outpace {

struct Asked {  // a row that is to be drafted for
    int64_t row, request;
    int64_t prompt;         // tokens of it that are the prompt's
    const int32_t* tokens;  // all that are committed
    size_t n;
    int size;  // most nodes, at least 1
    int levels = -1;  // that a drafter may take a forward each for; -1: as many as nodes
    bool adaptive = false;  // the policy chooses, not the request
    const Sampling* sampling = nullptr;  // its `index` aside; null: greedy
    const std::vector<Edit>* edits = nullptr;  // its penalties; null: none
    // Where it is not 0, a drafter that knows the chances of paths stops where all are less, and else goes on beyond `levels`.
    double floor = 0.0;

    int depth() const { return levels < 0 ? size : std::min(size, levels); }  // most levels of a draft
};

struct Final {  // a row's tokens that were committed in a step, and where the positions before them stand among the kept states
    int64_t row;
    int first;  // position before the first token
    std::vector<int32_t> tokens, places;
};

struct States {  // hidden states of positions [..][layers][hidden]
    const float* values;
    const std::vector<int>& layers;
};

class NativeDrafter {
public:
    virtual ~NativeDrafter() = default;
    // A tree for each row; what `trees` held before is overwritten.
    virtual void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) = 0;
    // Layers of the target whose outputs `observe` reads, ascending; none: there is nothing to hear.
    virtual const std::vector<int>& hidden_layers() const {
        static const std::vector<int> none;
        return none;
    }
    // Whether it takes a forward of its own for every level.
    virtual bool stepwise() const { return false; }
    // Takes in what became final; whether it wants to `read_ahead` now, which takes forwards of its network.
    virtual bool observe(const std::vector<Final>&, const States&) { return false; }
    virtual void read_ahead() {}
    // How many of the target's likeliest tokens after each verified token `rank` takes in; 0: none.
    virtual int ranks() const { return 0; }
    // tokens [n]: a row's pending token and its nodes; ids [n][ranks]: what the target finds likeliest after each, -1: none.
    virtual void rank(int64_t, const int32_t*, size_t, const int32_t*) {}
};

class NgramLookup : public NativeDrafter {
public:
    // Matches of `least` to `most` tokens, at most `candidates` of them, as one tree. `hit[l]`: how often the token after a match
    // of l tokens was right (the last for all longer ones); `older`: the share of what newer matches leave that the next one gets.
    NgramLookup(int least, int most, int candidates, std::vector<double> hit, double older);
    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;

private:
    int least_, most_;
    size_t candidates_;
    std::vector<double> hit_;
    double older_;
};

// The indexes of rows that `suffix` drafts for, and its history.
class SuffixRows : public NativeDrafter {
public:
    // `history` may be null, and must outlive this. `most`: longest match. Throws std::invalid_argument.
    SuffixRows(int64_t capacity, int most, SuffixRules rules, bool wide, SuffixIndex* history);
    SuffixRows(const SuffixRows&) = delete;

    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    // Forget until everything fits: the history first, then the older half of the largest row.
    void bound();
    // The row is gone; tokens of its prompt, or -1 if it was unknown.
    int64_t release(int64_t row);
    int64_t places() const;

    struct Row {
        int64_t row, request, prompt;
        std::unique_ptr<SuffixIndex> index;
        size_t known = 0;  // committed tokens that the index has seen
    };
    const std::vector<Row>& rows() const { return rows_; }

private:
    Draft tree(const Asked& asked);  // one row's; `bound` has to follow

    int64_t capacity_;
    int most_;
    SuffixRules rules_;
    bool wide_;
    SuffixIndex* history_;
    std::vector<Row> rows_;  // in the order in which they came
};

class RetrievalLookup : public NativeDrafter {
public:
    // The datastore must outlive it.
    RetrievalLookup(const Datastore& store, int places, int least) : store_(store), places_(places), least_(least) {}
    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;

private:
    const Datastore& store_;
    int places_, least_;
};

class ComposedDrafter : public NativeDrafter {
public:
    struct Part {
        NativeDrafter* drafter;  // outlives the composition
        bool fallback;   // asked only where the parts before it have proposed nothing
    };
    // A path of `deep` levels, or as many as the network may take, with the chance `sure`, spares its forwards: drafters/composed.py.
    ComposedDrafter(std::vector<Part> parts, double sure, int deep);
    void propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) override;
    const std::vector<int>& hidden_layers() const override { return layers_; }
    bool stepwise() const override { return stepwise_; }
    bool observe(const std::vector<Final>& rows, const States& states) override;
    void read_ahead() override;
    int ranks() const override;
    void rank(int64_t row, const int32_t* tokens, size_t n, const int32_t* ids) override;

private:
    using Found = std::vector<std::vector<Draft>>;  // by row, then part
    void ask(size_t part, const std::vector<Asked>& rows, const std::vector<char>& spared, Found& found);
    bool is_sure(const Draft& tree, int levels) const;

    std::vector<Part> parts_;
    const double sure_;
    const int deep_;
    std::vector<int> layers_;
    bool stepwise_ = false;
};

}  // namespace outpace
