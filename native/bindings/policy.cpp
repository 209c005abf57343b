// What Python sees of the policy, which steps ask in C++ alone; see control/adaptive.py.
#include "bindings/policy.h"

#include <cstdio>
#include <stdexcept>

namespace outpace {
namespace {

struct Reason {
    const char *words, *numbers;  // the latter of Decision::one and two
};

constexpr Reason kWhy[] = {
    {"the request fixed its size", "it asks for %.0f tokens a step, and %.0f were proposed"},
    {"there is no room for a draft", "%.0f tokens fit before the last of the %.0f that are left"},
    {"its drafter rests, since asking it has not paid lately", "asking takes %.3f plain steps, and lately saved %.3f"},
    {"its drafter proposed nothing", "%.0f of the %.0f tokens that it might have"},
    {"the nodes that are expected to pay are verified", "they bring %.2f tokens, and have to bring %.2f for their time"},
    {"nodes are tried, to learn whether drafts pay now", "the best brings %.2f tokens, and has to bring %.2f for its time"},
    {"no proposed node is expected to pay for its time", "the best brings %.2f tokens, and has to bring %.2f"},
    {"drafts would slow down rows of the batch that gain nothing", "they take %.2f plain steps, and such a row may lose %.2f"},
    {"the budget of time that drafts may lose does not cover it", "it takes %.2f plain steps, and the budget is %.2f"},
    {"a plain step, to measure what one takes", "the last was %.0f steps ago, and %.0f pairs with drafts of the last size were compared"},
    {"no forward of its drafter is expected to pay for its time", "the first brings %.2f tokens, and has to bring %.2f"},
    {"the step would take longer than it may beside others", "it would take %.2f plain steps, and may take %.2f"},
    {"wider drafts wait until narrower ones were measured", "it would have %.0f nodes, and may have %.0f now"},
    {"it may not draft now", "%.0f tokens are allowed, and %.0f are left"},
    {"its drafter has not read the prompt, which is not expected to pay", "it would take %.1f plain steps, and may take %.1f"},
};

// A line with two numbers in it.
template <typename... Numbers>
std::string line(const char* format, Numbers... numbers) {
    char found[160];
    std::snprintf(found, sizeof found, format, numbers...);
    return found;
}

// What a mixture makes of a step's price; "" where there is none.
std::string experts_of(const Policy& policy, const Policy::Decision& decision) {
    using Why = Policy::Why;
    const StepCosts& costs = policy.costs();
    const int nodes = std::max(decision.size, 1);
    const double read = costs.reads(nodes);
    const bool priced = decision.why == Why::Drafts || decision.why == Why::Try || decision.why == Why::Dear ||
                        decision.why == Why::Spent || decision.why == Why::Others || decision.why == Why::Long;
    if (!priced || read <= 0.0) return "";
    return line("; a check of %d tokens reads %.0f of %.0f experts and takes %.2f plain steps", costs.rows() + nodes, read, costs.experts(),
        1.0 + costs.more(nodes));
}

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
    const Reason& reason = kWhy[static_cast<size_t>(decision.why)];
    std::string why = reason.words;
    if (policy.explain) why += ": " + line(reason.numbers, decision.one, decision.two) + experts_of(policy, decision);
    const nb::object expected = decision.expected > 0.0 ? nb::object(nb::float_(decision.expected)) : nb::none();
    return nb::make_tuple(decision.size, expected, why, nb::tuple(nb::cast(decision.worth)));
}

void bind_policy(nb::module_& m) {
    nb::class_<InStep>(m, "InStep", "Where a row stands in a policy's step: what `Rows.in_step` gives, for `Slots`.");
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
