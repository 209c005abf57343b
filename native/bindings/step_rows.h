// What a step in C++ has of its rows: what stays, what is new in the step, and nodes that are drafted for them.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/chooser.h"
#include "drafting/lookups.h"

namespace outpace {

// Drafting failed, before anything was changed.
struct DraftFault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What stays as it is of a sequence while it has its row.
struct StepRow {
    int32_t row;
    int64_t request, prompt;
    bool adaptive;
    nb::object drafter, held;  // its name; keeps `lookup` alive
    Lookup* lookup;            // null: it decodes plainly
    nb::tuple names;           // of the lookup's sources
    Sampling sampling;         // `index` aside
    nb::object levels;         // the source that takes a forward for every level, or None; as `nodes`, see Python's DraftCost
    bool nodes;
};

// Nodes of B rows, at most `width` each: Drafts of exact/drafts.py.
struct Nodes {
    int width = 0;
    bool chains = true;
    std::vector<int32_t> widths, tokens, parents;
    std::vector<float> gains;
    std::vector<uint8_t> sources;

    void clear(size_t rows, int most) {
        width = most;
        chains = true;
        widths.assign(rows, 0);
        const size_t size = rows * static_cast<size_t>(most);
        tokens.assign(size, 0);
        parents.assign(size, -1);
        gains.assign(size, 0.0f);
        sources.assign(size, 0);
    }
    size_t at(size_t i) const { return i * static_cast<size_t>(width); }
};

struct ChunkNow {  // tokens `first` ... of a row's prompt, whose KV is written in this step beside rows that decode
    const StepRow* its;
    int32_t first;
    std::vector<int32_t> tokens;  // and the one that follows them

    size_t count() const { return tokens.size() - 1; }
};

struct RowNow {  // a decoding row in this step
    const StepRow* its;
    int most, asked, levels;
    size_t length;
    std::optional<IntView> tokens;
    int32_t pending;
    bool settled;
};

}  // namespace outpace
