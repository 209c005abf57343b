#pragma once

#include "bindings/bindings.h"
#include "drafting/policy.h"

namespace outpace {

// The fields of control/adaptive.py's Decision for row i of the step under way.
using Decided = TupleOf<int, std::optional<double>, nb::str, TuplesOf<double>>;
Decided decision_of(const Policy& policy, size_t i);

}  // namespace outpace
