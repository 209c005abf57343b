#pragma once

#include "bindings/bindings.h"
#include "drafting/policy.h"

namespace outpace {

// The fields of control/policy.py's Decision for row i of the step under way.
nb::tuple decision_of(const Policy& policy, size_t i);

}  // namespace outpace
