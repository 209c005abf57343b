// A chooser's parameters and noise, as models/native/output.py describes them.
#pragma once

#include "bindings/bindings.h"
#include "sampling/choose.h"

namespace outpace {

inline Sampling sampling_of(const nb::tuple& d) {
    return {nb::cast<double>(d[0]), nb::cast<int>(d[1]), nb::cast<double>(d[2]), nb::cast<double>(d[3]), nb::cast<uint64_t>(d[4]),
            nb::cast<uint32_t>(d[5]), nb::cast<uint32_t>(d[6]), nb::cast<uint32_t>(d[7])};
}

}  // namespace outpace
