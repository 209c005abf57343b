#pragma once

#include <vector>

#include "bindings/bindings.h"
#include "drafting/policy.h"

namespace outpace {

// The fields of control/adaptive.py's Decision for row i of the step under way.
using Decided = TupleOf<int, std::optional<double>, nb::str, TuplesOf<double>>;
Decided decision_of(const Policy& policy, size_t i);

// A row of a policy's step, and what its drafter's sources are called there: what a composition whose parts are Python's needs.
struct InStep {
    nb::object policy;
    size_t place;
    std::vector<int> sources;
};

}  // namespace outpace
