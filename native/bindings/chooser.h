// A chooser's parameters and noise by name, as models/native/output.py describes them.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "bindings/bindings.h"
#include "sampling/choose.h"

namespace outpace {

// Throws std::invalid_argument for a name that is missing, or that is no field (but `rules`).
inline Sampling sampling_of(const Named& described) {
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

template <class T>
std::vector<T> values_of(const nb::dict& rule, const char* name) {
    using Values = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    const Values values = nb::cast<Values>(rule[name]);
    return std::vector<T>(values.data(), values.data() + values.shape(0));
}

// One rule by name, as models/native/output.py describes it. Throws std::invalid_argument for one that does not fit.
inline Edit edit_of(const nb::dict& rule) {
    Edit edit;
    const std::string kind = nb::cast<std::string>(rule["kind"]);
    if (kind == "mask") {
        edit.kind = Edit::Mask;
        edit.bits = values_of<uint32_t>(rule, "bits");
        return edit;
    }
    edit.ids = values_of<int32_t>(rule, "ids");
    if (kind == "penalties") {
        edit.kind = Edit::Penalties;
        edit.output = values_of<int32_t>(rule, "output");
        edit.values = values_of<float>(rule, "counts");
        edit.repetition = nb::cast<float>(rule["repetition"]);
        edit.presence = nb::cast<float>(rule["presence"]);
        edit.frequency = nb::cast<float>(rule["frequency"]);
        if (edit.values.size() != edit.output.size()) throw std::invalid_argument("penalties need a count for each token");
    } else if (kind == "bias") {
        edit.kind = Edit::Bias;
        edit.values = values_of<float>(rule, "values");
        if (edit.values.size() != edit.ids.size()) throw std::invalid_argument("a bias needs a value for each token");
    } else if (kind == "allowed") {
        edit.kind = Edit::Allowed;
    } else {
        throw std::invalid_argument("unknown rule '" + kind + "'");
    }
    return edit;
}

inline std::vector<Edit> edits_of(const nb::list& rules) {
    std::vector<Edit> edits;
    for (const nb::handle rule : rules) edits.push_back(edit_of(nb::cast<nb::dict>(rule)));
    return edits;
}

}  // namespace outpace
