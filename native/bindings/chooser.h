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

}  // namespace outpace
