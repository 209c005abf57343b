// What Python sees of the policy.
#include "bindings/policy.h"

namespace outpace {

void bind_policy(nb::module_& m) {
    nb::class_<BoundPolicy>(m, "Policy")
        .def("__init__",
            [](BoundPolicy* self, std::vector<double> table, double last_width, double last_seconds, double slope, double row,
                double position, double position_width, double stretch, nb::dict seams, bool explain) {
        if (!(stretch >= 1.0)) throw std::invalid_argument("a step cannot be shorter than a plain one");
        if (table.size() < 2) throw std::invalid_argument("the cost table is empty");
        new (self) BoundPolicy(
            {std::move(table), last_width, last_seconds, slope, row, position, position_width}, stretch, std::move(seams), explain);
    },
            "table"_a, "last_width"_a, "last_seconds"_a, "slope"_a, "row"_a, "position"_a, "position_width"_a, "stretch"_a, "seams"_a,
            "explain"_a)
        .def("plan", &BoundPolicy::plan, "rows"_a, "most"_a, "load"_a)
        .def("trim", &BoundPolicy::trim, "drafts"_a)
        .def("learn", &BoundPolicy::learn, "verdicts"_a, "seconds"_a)
        .def("release", &BoundPolicy::release, "row"_a)
        .def("state", &BoundPolicy::state)
        .def_prop_rw("explain", &BoundPolicy::explain, &BoundPolicy::set_explain)
        .def("__len__", &BoundPolicy::size);
}

}  // namespace outpace
