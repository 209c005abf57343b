// What the bindings of learned drafters' networks convert alike.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "model/draft_network.h"

namespace outpace {

using States3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;  // hidden states [n, layers, hidden]

inline std::vector<float> values_of(const Floats& values) { return {values.data(), values.data() + values.size()}; }

inline void fits(DraftNetwork& network, const States3& states) {
    if (static_cast<int>(states.shape(1)) != network.layers_read() || static_cast<int>(states.shape(2)) != network.model().hidden())
        throw std::invalid_argument("hidden states are [n, " + std::to_string(states.shape(1)) + ", " + std::to_string(states.shape(2)) +
                                    "], but must be [n, " + std::to_string(network.layers_read()) + ", " +
                                    std::to_string(network.model().hidden()) + "]");
}

// None: greedy; else (temperature, seed, sample, index).
inline Sampling noise_of(const nb::handle& given) {
    Sampling noise;
    if (given.is_none()) return noise;
    const nb::tuple parts = nb::cast<nb::tuple>(given);
    noise.temperature = nb::cast<double>(parts[0]);
    noise.seed = nb::cast<uint64_t>(parts[1]);
    noise.sample = nb::cast<uint32_t>(parts[2]);
    noise.index = nb::cast<uint32_t>(parts[3]);
    return noise;
}

}  // namespace outpace
