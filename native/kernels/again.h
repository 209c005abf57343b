// Where a result became zero for being tiny, x86 may have 2^-126 (denormals.h). NEON's fast kernels leave such results to the
// processor, and `portable`, whose every operation gives x86's, computes the call again where the processor made one.
#pragma once

#include <algorithm>

#include "kernels/table.h"
#include "runtime/denormals.h"

namespace outpace {
namespace OUTPACE_NS {

// For kernels that read nothing of what they write.
template <auto kernel, auto in_table, class... Given>
static void or_again(Given... given) {
    const Underflows underflows;
    kernel(given...);
    if (underflows.any()) (kernels_portable().*in_table)(given...);
}

// For `gate`, whose result may stand where its input stood.
template <auto kernel>
static void gate_or_again(Activation activation, const float* gate, const float* up, int n, float* out) {
    constexpr int most = 256;
    float before[most];
    for (int i = 0; i < n; i += most) {
        const int some = std::min(n - i, most);
        std::copy(gate + i, gate + i + some, before);
        or_again<kernel, &Kernels::gate>(activation, static_cast<const float*>(before), up + i, some, out + i);
    }
}

}  // namespace OUTPACE_NS
}  // namespace outpace
