// A chooser's parameters and noise by name, as models/native/output.py describes them.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "bindings/bindings.h"
#include "sampling/choose.h"

namespace outpace {

// Throws std::invalid_argument for a name that is missing, or that is no field (but `rules`).
inline Sampling sampling_of(const nb::dict& described) {
    Sampling sampling;
    size_t known = described.contains("rules") ? 1 : 0;
    sampling.each_field([&](const char* name, auto& field) {
        PyObject* value = PyDict_GetItemString(described.ptr(), name);
        if (!value) throw std::invalid_argument(std::string("a chooser's ") + name + " is missing");
        field = nb::cast<std::decay_t<decltype(field)>>(nb::handle(value));
        ++known;
    });
    if (known != described.size()) throw std::invalid_argument("a chooser has parameters that this runtime does not know");
    return sampling;
}

// One rule as Python describes it: (name, arrays and numbers ...); see models/native/output.py.
inline Edit edit_of(const nb::tuple& rule) {
    const auto ints = [](nb::handle h) {
        const Ints a = nb::cast<Ints>(h);
        return std::vector<int32_t>(a.data(), a.data() + a.shape(0));
    };
    const auto numbers = [](nb::handle h) {
        const Floats a = nb::cast<Floats>(h);
        return std::vector<float>(a.data(), a.data() + a.shape(0));
    };
    Edit edit;
    const std::string name = nb::cast<std::string>(rule[0]);
    if (name == "mask") {
        using Bits = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
        const Bits bits = nb::cast<Bits>(rule[1]);
        edit.kind = Edit::Mask;
        edit.bits.assign(bits.data(), bits.data() + bits.shape(0));
        return edit;
    }
    edit.ids = ints(rule[1]);
    if (name == "penalties") {
        edit.kind = Edit::Penalties;
        edit.output = ints(rule[2]);
        edit.values = numbers(rule[3]);
        edit.repetition = nb::cast<float>(rule[4]);
        edit.presence = nb::cast<float>(rule[5]);
        edit.frequency = nb::cast<float>(rule[6]);
        if (edit.values.size() != edit.output.size()) throw std::invalid_argument("penalties need a count for each token");
    } else if (name == "bias") {
        edit.kind = Edit::Bias;
        edit.values = numbers(rule[2]);
        if (edit.values.size() != edit.ids.size()) throw std::invalid_argument("a bias needs a value for each token");
    } else if (name == "allowed") {
        edit.kind = Edit::Allowed;
    } else {
        throw std::invalid_argument("unknown rule '" + name + "'");
    }
    return edit;
}

inline std::vector<Edit> edits_of(const nb::list& rules) {
    std::vector<Edit> edits;
    for (const nb::handle rule : rules) edits.push_back(edit_of(nb::cast<nb::tuple>(rule)));
    return edits;
}

}  // namespace outpace
