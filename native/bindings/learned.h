// What the bindings of learned drafters' networks convert alike.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "model/draft_network.h"

namespace outpace {

using States3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;  // hidden states [n, layers, hidden]

inline void fits(DraftNetwork& network, const States3& states) {
    const int layers = network.layers_read(), hidden = network.model().hidden();
    if (static_cast<int>(states.shape(1)) != layers || static_cast<int>(states.shape(2)) != hidden)
        throw std::invalid_argument("hidden states are [n, " + std::to_string(states.shape(1)) + ", " + std::to_string(states.shape(2)) +
                                    "], but must be [n, " + std::to_string(layers) + ", " + std::to_string(hidden) + "]");
}
inline void fits(DraftNetwork& network, const States3& states, const Ints& beside, const char* what) {
    fits(network, states);
    if (beside.shape(0) != states.shape(0))
        throw std::invalid_argument(std::to_string(beside.shape(0)) + " " + what + " and the hidden states of " +
                                    std::to_string(states.shape(0)) + " differ in length");
}

template <class Rows>
std::vector<int64_t> keys_of(const std::map<int64_t, Rows>& rows) {
    std::vector<int64_t> found;
    for (const auto& [row, known] : rows) found.push_back(row);
    return found;
}

using Noise = std::optional<std::tuple<double, uint64_t, uint32_t, uint32_t>>;  // temperature, seed, sample, index; None: greedy

inline Sampling sampling_of(const Noise& noise) {
    Sampling sampling;
    if (noise) std::tie(sampling.temperature, sampling.seed, sampling.sample, sampling.index) = *noise;
    return sampling;
}

}  // namespace outpace
