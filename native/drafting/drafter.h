// What every native drafter is: a batch of rows goes in, a tree for each comes out, and learned ones read what became final.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "drafting/draft.h"
#include "sampling/choose.h"

namespace outpace {

class Policy;

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
    bool drawn = false;  // it samples under rejection: how much is drafted may not depend on what is drawn
    int64_t start = 0;   // a drafter that would have to read tokens before this one reads from here on instead
    // The policy in whose step it is the row `place`, for compositions, and what their parts' numbers stand for there; null: none.
    Policy* policy = nullptr;
    size_t place = 0;
    const std::vector<int>* sources = nullptr;

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

}  // namespace outpace
