// What Python sees of the policy, which steps ask in C++ alone; see control/adaptive.py.
#include "bindings/policy.h"

#include <cstdio>
#include <stdexcept>

namespace outpace {
namespace {

constexpr const char* kWhy[] = {
    "the request fixed its size",
    "there is no room for a draft",
    "its drafter rests, since asking it has not paid lately",
    "its drafter proposed nothing",
    "the nodes that are expected to pay are verified",
    "nodes are tried, to learn whether drafts pay now",
    "no proposed node is expected to pay for its time",
    "drafts would slow down rows of the batch that gain nothing",
    "the budget of time that drafts may lose does not cover it",
    "a plain step, to measure what one takes",
    "no forward of its drafter is expected to pay for its time",
    "the step would take longer than it may beside others",
    "wider drafts wait until narrower ones were measured",
};

Named state(const Policy& policy) {
    nb::dict found;
    found["budget"] = policy.budget();
    found["advantage"] = policy.advantage();
    nb::list curves;
    for (const auto& [rows, curve] : policy.costs().curves()) {
        nb::list more;
        for (size_t k = 0; k < StepCosts::kSizes; ++k)
            if (curve.ratios[k].count()) more.append(nb::make_tuple(1 << k, curve.more[k], curve.ratios[k].count()));
        curves.append(nb::make_tuple(rows, curve.steps, curve.plain, nb::tuple(more)));
    }
    found["curves"] = nb::tuple(curves);
    return found;
}

}  // namespace

Decided decision_of(const Policy& policy, size_t i) {
    const Policy::Decision& decision = policy.decision(i);
    std::string why = kWhy[static_cast<size_t>(decision.why)];
    if (policy.explain && decision.price > 0.0) {
        char numbers[100];
        std::snprintf(numbers, sizeof numbers, ": the first node takes the time of %.2f tokens, the best brings %.2f", decision.price,
            decision.brings);
        why += numbers;
    }
    const nb::object expected = decision.expected > 0.0 ? nb::object(nb::float_(decision.expected)) : nb::none();
    return nb::make_tuple(decision.size, expected, why, nb::tuple(nb::cast(decision.worth)));
}

void bind_policy(nb::module_& m) {
    nb::class_<Policy>(m, "Policy",
        "What is behind `--size auto`; control/adaptive.py makes it, of a table of costs by new tokens and what lies beyond. stretch: the "
        "longest step that holds others up, in plain steps. Raises ValueError.")
        .def("__init__",
            [](Policy* self, std::vector<double> table, double last_width, double last_seconds, double slope, double row, double position,
                double position_width, double stretch, double experts, double used, double expert, std::vector<double> read) {
        if (!(stretch >= 1.0)) throw std::invalid_argument("a step cannot be shorter than a plain one");
        if (table.size() < 2) throw std::invalid_argument("the cost table is empty");
        new (self) Policy(
            {std::move(table), last_width, last_seconds, slope, row, position, position_width, experts, used, expert, std::move(read)},
            stretch);
    },
            "table"_a, "last_width"_a, "last_seconds"_a, "slope"_a, "row"_a, "position"_a, "position_width"_a, "stretch"_a,
            "experts"_a = 0.0, "used"_a = 0.0, "expert"_a = 0.0, "read"_a = std::vector<double>())
        .def("release", &Policy::release, "row"_a)
        .def("state", &state, "budget, advantage, curves: (rows, steps, plain seconds, ((nodes, plain steps, ratios), ...)).")
        .def_rw("explain", &Policy::explain)
        .def("__len__", &Policy::rows);
}

}  // namespace outpace
