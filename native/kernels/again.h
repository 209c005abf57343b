// Paths that leave tiny results to the processor: where one became zero, `portable` computes the same call again (denormals.h).
// Only for kernels that read nothing of what they write.
#pragma once

#include "kernels/table.h"
#include "runtime/denormals.h"

namespace outpace {
namespace OUTPACE_NS {

template <auto kernel, auto in_table, class... Given>
static void or_again(Given... given) {
    const Underflows underflows;
    kernel(given...);
    if (underflows.any()) (kernels_portable().*in_table)(given...);
}

}  // namespace OUTPACE_NS
}  // namespace outpace
