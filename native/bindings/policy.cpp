// What Python sees of the policy. Steps in C++ use it without these; the seam in Python is control/adaptive.py.
#include "bindings/policy.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

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
    "drafts have lost as much time as they may, and pause",
    "a plain step, to measure what one takes",
    "no forward of its drafter is expected to pay for its time",
    "the step would take longer than it may beside others",
};

using Kind = std::tuple<int, bool, int, int, bool, bool>;  // of Policy::Kind, the request aside
using Row = std::tuple<int64_t, int64_t, bool, int, double, Kind>;
using Proposal = std::tuple<std::vector<int32_t>, std::vector<double>, std::vector<int>, int>;  // parents, gains, sources, levels

std::pair<std::vector<int>, std::vector<int>> plan(Policy& policy, const std::vector<Row>& rows, int64_t prefill) {
    std::vector<Policy::View> views;
    for (const auto& [row, request, adaptive, most, context, kind] : rows) {
        const auto& [sampling, rejection, drafter, levels, nodes, trims] = kind;
        if (!policy.knows(row, request)) policy.admit(row, {request, sampling, rejection, drafter, levels, nodes, trims});
        views.push_back({row, adaptive, std::max(most, 0), context});
    }
    policy.plan(views, prefill);
    std::pair<std::vector<int>, std::vector<int>> found;
    for (size_t i = 0; i < rows.size(); ++i) found.first.push_back(policy.nodes(i)), found.second.push_back(policy.levels(i));
    return found;
}

std::vector<std::vector<int>> trim(Policy& policy, const std::vector<Proposal>& drafts, bool drawn) {
    if (drafts.size() != policy.planned()) throw std::invalid_argument("trim is for the rows of the last plan");
    std::vector<Draft> trees;
    std::vector<const Draft*> each;
    trees.reserve(drafts.size());
    for (const auto& [parents, gains, sources, levels] : drafts) {
        if (gains.size() != parents.size() || sources.size() != parents.size())
            throw std::invalid_argument("a draft's parents, gains and sources differ in length");
        for (size_t n = 0; n < parents.size(); ++n)
            if (parents[n] < -1 || parents[n] >= static_cast<int>(n)) throw std::invalid_argument("a parent must come before its child");
        trees.push_back({std::vector<int32_t>(parents.size()), parents, gains, sources, levels});
        each.push_back(&trees.back());
    }
    policy.trim(each, drawn);
    std::vector<std::vector<int>> kept;
    for (size_t i = 0; i < trees.size(); ++i) kept.push_back(policy.kept(i));
    return kept;
}

void learn(Policy& policy, const std::vector<std::vector<int32_t>>& paths, double draft, double body) {
    if (paths.size() != policy.planned()) throw std::invalid_argument("learn is for the rows of the last plan");
    for (size_t i = 0; i < paths.size(); ++i)
        for (const int32_t node : paths[i])
            if (node < 0 || static_cast<size_t>(node) >= policy.kept(i).size()) throw std::invalid_argument("the path leaves the draft");
    std::vector<const std::vector<int32_t>*> each;
    for (const auto& path : paths) each.push_back(&path);
    policy.learn(each, {draft, body});
}

nb::dict state(const Policy& policy) {
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

nb::tuple decision_of(const Policy& policy, size_t i) {
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
    nb::class_<Policy>(m, "Policy")
        .def("__init__",
            [](Policy* self, std::vector<double> table, double last_width, double last_seconds, double slope, double row, double position,
                double position_width, double stretch) {
        if (!(stretch >= 1.0)) throw std::invalid_argument("a step cannot be shorter than a plain one");
        if (table.size() < 2) throw std::invalid_argument("the cost table is empty");
        new (self) Policy({std::move(table), last_width, last_seconds, slope, row, position, position_width}, stretch);
    },
            "table"_a, "last_width"_a, "last_seconds"_a, "slope"_a, "row"_a, "position"_a, "position_width"_a, "stretch"_a)
        .def("plan", &plan, "rows"_a, "prefill"_a)
        .def("trim", &trim, "drafts"_a, "drawn"_a)
        .def("decision", &decision_of, "row"_a)
        .def("learn", &learn, "paths"_a, "draft"_a, "body"_a)
        .def("release", &Policy::release, "row"_a)
        .def("state", &state)
        .def_static("sampling_class", &Policy::sampling_class, "temperature"_a)
        .def_rw("explain", &Policy::explain)
        .def("__len__", &Policy::rows);
}

}  // namespace outpace
