// The policy at its seam. It takes the seam's own values (RowView, Load, Drafts, Verdicts) and gives them back
// (Sizes, Drafts, Decision), since a step of one request has no time for copies in between.
#pragma once

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "drafting/policy.h"

namespace outpace {

inline constexpr const char* kWhy[] = {
    "the request fixed its size",
    "there is no room for a draft",
    "waits before it asks again: its drafts did not pay lately",
    "nothing was proposed",
    "drafts what pays",
    "one node is tried, to know whether drafts pay now",
    "no node is worth its time",
    "rows that gain nothing have waited as long as they may",
    "drafting has lost as much as it may",
    "a plain step, to know what one takes",
    "no level is worth its forward",
    "the step would take longer than it may beside others",
};

// A C-contiguous array of `Item` as it was at one time, or none: what has been checked stays so, whoever writes into it.
template <class Item>
class Field {
public:
    Field(nb::handle from, const char* name) {
        if (from.is_none()) return;
        Py_buffer view;
        if (PyObject_GetBuffer(from.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) throw nb::python_error();
        const char kind = view.format && view.format[0] ? view.format[std::strlen(view.format) - 1] : 'B';
        const bool fits = std::is_floating_point_v<Item> ? kind == 'f' : std::strchr(sizeof(Item) == 1 ? "Bb?" : "il", kind) != nullptr;
        held_ = view.itemsize == static_cast<Py_ssize_t>(sizeof(Item)) && fits;
        if (held_) {
            shape_.assign(view.shape, view.shape + view.ndim);
            values_.resize(static_cast<size_t>(view.len) / sizeof(Item));
            if (view.len > 0) std::memcpy(values_.data(), view.buf, static_cast<size_t>(view.len));
        }
        PyBuffer_Release(&view);
        if (!held_) throw std::invalid_argument(std::string(name) + " is of another type than the seam says");
    }

    const Item* data() const { return held_ ? values_.data() : nullptr; }
    // Throws unless the shape is [rows] or [rows, width].
    void expect(size_t rows, std::optional<size_t> width, const char* name) const {
        if (!held_) return;
        const bool fits = shape_.size() == (width ? 2 : 1) && shape(0) == rows && (!width || shape(1) == *width);
        if (!fits) throw std::invalid_argument(std::string(name) + " has another shape than the step's rows");
    }
    size_t shape(size_t axis) const { return axis < shape_.size() ? static_cast<size_t>(shape_[axis]) : 0; }

private:
    std::vector<Item> values_;
    std::vector<Py_ssize_t> shape_;
    bool held_ = false;
};

// A named tuple without a call of its Python constructor.
template <class... Values>
nb::object named(nb::handle type, Values&&... values) {
    const nb::tuple fields = nb::make_tuple(std::forward<Values>(values)...);
    const nb::tuple one = nb::make_tuple(fields);
    static const auto make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
    PyObject* made = make(reinterpret_cast<PyTypeObject*>(type.ptr()), one.ptr(), nullptr);
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

class BoundPolicy {
public:
    BoundPolicy(CostTable cost, double stretch, nb::dict seams, bool explain)
        : policy_(std::move(cost), stretch),
          sizes_(seams["Sizes"]),
          decision_(seams["Decision"]),
          drafts_(seams["Drafts"]),
          empty_(seams["empty"]),
          int32_(seams["int32"]),
          uint8_(seams["uint8"]),
          explain_(explain) {
        for (size_t i = 0; i < std::size(kWhy); ++i) {
            why_.push_back(nb::str(kWhy[i]));
            undecided_.push_back(named(decision_, 0, nb::none(), why_.back(), nb::tuple()));
        }
    }

    BoundPolicy(const BoundPolicy&) = delete;

    nb::object plan(const nb::sequence& rows, const nb::sequence& most, const nb::object& load) {
        const nb::object contexts = load.attr("contexts");
        const size_t b = nb::len(rows);
        if (nb::len(most) != b || nb::len(contexts) != b) throw std::invalid_argument("rows, most and contexts differ in length");
        views_.clear();
        for (size_t i = 0; i < b; ++i) {
            const nb::object view = rows[i];
            const int64_t row = nb::cast<int64_t>(view.attr("row")), request = nb::cast<int64_t>(view.attr("request"));
            if (!policy_.knows(row, request)) policy_.admit(row, kind_of(view, request));
            const nb::object allowed = most[i], context = contexts[i];
            views_.push_back({row, nb::cast<bool>(view.attr("adaptive")), std::max(nb::cast<int>(allowed), 0), nb::cast<double>(context)});
        }
        policy_.plan(views_, nb::cast<int64_t>(load.attr("prefill")));
        nb::list nodes, levels;
        for (size_t i = 0; i < b; ++i) {
            nodes.append(policy_.nodes(i));
            levels.append(policy_.levels(i));
        }
        return named(sizes_, nodes, levels);
    }

    nb::tuple trim(const nb::object& drafts) {
        const size_t b = policy_.planned();
        const Field<int32_t> widths(drafts.attr("widths"), "widths"), tokens(drafts.attr("tokens"), "tokens");
        const Field<int32_t> parents(drafts.attr("parents"), "parents");
        const Field<float> said(drafts.attr("confidence"), "confidence");
        const Field<uint8_t> source(drafts.attr("source"), "source");
        const Field<int32_t> levels(drafts.attr("levels"), "levels");
        const size_t w = tokens.shape(1);
        if (widths.shape(0) != b) throw std::invalid_argument("trim is for the rows of the last plan");
        widths.expect(b, std::nullopt, "widths");
        tokens.expect(b, w, "tokens");
        parents.expect(b, w, "parents");
        said.expect(b, w, "confidence");
        source.expect(b, w, "source");
        levels.expect(b, std::nullopt, "levels");
        const nb::object q = drafts.attr("q"), names = drafts.attr("sources");
        number(names);
        bool any = false;
        for (size_t i = 0; i < b; ++i) {
            const int32_t width = widths.data()[i];
            if (width < 0 || static_cast<size_t>(width) > w) throw std::invalid_argument("widths are out of range");
            any = any || width;
            for (size_t n = 0; n < static_cast<size_t>(width); ++n) {
                if (parents.data() && (parents.data()[i * w + n] < -1 || parents.data()[i * w + n] >= static_cast<int>(n)))
                    throw std::invalid_argument("a parent must come before its child");
                if (source.data() && source.data()[i * w + n] >= sources_.size()) throw std::invalid_argument("a source has no name");
            }
        }
        policy_.trim(
            {widths.data(), parents.data(), said.data(), source.data(), w, sources_.data(), !q.is_none(), levels.data()}, explain_);
        nb::list decisions;
        bool same = true;
        size_t widest = 0;
        for (size_t i = 0; i < b; ++i) {
            decisions.append(decision(i));
            same = same && static_cast<int32_t>(policy_.kept(i).size()) == widths.data()[i];
            widest = std::max(widest, policy_.kept(i).size());
        }
        if (same || !any) return nb::make_tuple(drafts, decisions);
        return nb::make_tuple(kept(drafts, names, q, tokens.data(), parents.data(), source.data(), w, widest), decisions);
    }

    void learn(const nb::object& verdicts, const nb::object& seconds) {
        const size_t b = policy_.planned();
        const Field<int32_t> accepted(verdicts.attr("accepted"), "accepted"), path(verdicts.attr("path"), "path");
        if (accepted.shape(0) != b || path.shape(0) != b) throw std::invalid_argument("learn is for the rows of the last plan");
        const size_t depth = path.shape(1);
        accepted.expect(b, std::nullopt, "accepted");
        path.expect(b, depth, "path");
        for (size_t i = 0; i < b; ++i)
            for (int32_t n = 0; n < accepted.data()[i] && static_cast<size_t>(n) < depth; ++n) {
                const int32_t node = path.data()[i * depth + static_cast<size_t>(n)];
                if (node < 0 || static_cast<size_t>(node) >= policy_.kept(i).size())
                    throw std::invalid_argument("the path leaves the draft");
            }
        const auto of = [&seconds](const char* phase) { return nb::cast<double>(seconds[phase]); };
        policy_.learn(accepted.data(), path.data(), depth, {of("draft"), of("target") + of("verify") + of("other")});
    }

    Policy& policy() { return policy_; }
    // Requests whose acceptance may be pooled.
    static int sampling_class(double temperature) { return temperature == 0 ? 0 : temperature < 0.9 ? 1 : 2; }
    nb::object decision(size_t i) const {
        const Policy::Said& said = policy_.said(i);
        const size_t why = static_cast<size_t>(said.why);
        if (!said.size && said.expected == 0.0 && !explain_) return undecided_[why];
        nb::object text = why_[why], expected = nb::none(), worth = nb::tuple();
        if (said.expected > 0.0) expected = nb::float_(said.expected);
        if (explain_) {
            if (said.price > 0.0) {
                char numbers[160];
                std::snprintf(numbers, sizeof numbers, "%s: the first node takes the time of %.2f tokens, the best brings %.2f", kWhy[why],
                    said.price, said.brings);
                text = nb::str(numbers);
            }
            worth = nb::tuple(nb::cast(policy_.gains(i)));
        }
        return named(decision_, said.size, expected, text, worth);
    }

    void release(int64_t row) { policy_.release(row); }
    size_t size() const { return policy_.rows(); }
    bool explain() const { return explain_; }
    void set_explain(bool explain) { explain_ = explain; }

    nb::dict state() const {
        nb::dict found;
        found["capital"] = policy_.capital();
        found["advantage"] = policy_.advantage();
        found["tables"] = policy_.tables();
        nb::list curves;
        for (const auto& one : policy_.pace().learnt()) {
            nb::list more;
            for (const auto& [nodes, steps, sd] : one.more) more.append(nb::make_tuple(static_cast<int>(nodes), steps, sd));
            curves.append(nb::make_tuple(one.rows, one.context, one.steps, one.plain, more));
        }
        found["curves"] = curves;
        return found;
    }

private:
    Policy::Kind kind_of(const nb::object& view, int64_t request) {
        const double temperature = nb::cast<double>(view.attr("chooser").attr("params").attr("temperature"));
        const nb::object cost = view.attr("cost"), levels = cost.attr("levels");
        const bool rejection = nb::cast<std::string>(view.attr("acceptance")) == "rejection";
        return {request, sampling_class(temperature), rejection, number_of(drafters_, view.attr("drafter")),
            levels.is_none() ? -1 : number_of(numbers_, levels), nb::cast<bool>(cost.attr("nodes")), nb::cast<bool>(cost.attr("trims"))};
    }

    static int number_of(nb::dict& numbers, const nb::object& name) {
        if (!numbers.contains(name)) numbers[name] = nb::len(numbers);
        return nb::cast<int>(numbers[name]);
    }

    void number(const nb::object& names) {
        sources_.clear();
        for (const nb::handle name : nb::cast<nb::tuple>(names)) sources_.push_back(number_of(numbers_, nb::borrow(name)));
        if (sources_.empty()) sources_.push_back(number_of(numbers_, nb::str("draft")));
    }

    // Only the nodes that are kept, with their parents; confidence has served its purpose.
    nb::object kept(const nb::object& drafts, const nb::object& names, const nb::object& q, const int32_t* tokens, const int32_t* parents,
        const uint8_t* source, size_t w, size_t widest) const {
        const size_t b = policy_.planned();
        nb::object widths = empty_(b, int32_);
        int32_t* count = writable<int32_t>(widths);
        for (size_t i = 0; i < b; ++i) count[i] = static_cast<int32_t>(policy_.kept(i).size());
        if (!parents)  // a chain keeps its beginning
            return drafts_(drafts.attr("tokens"), widths, nb::none(), q, nb::none(), drafts.attr("source"), names);
        nb::object both = empty_(nb::make_tuple(2, b, widest), int32_), sources = nb::none(), drawn = nb::none();
        if (source) sources = empty_(nb::make_tuple(b, widest), uint8_);
        if (!q.is_none()) drawn = empty_(nb::make_tuple(b, widest, q.attr("shape")[2]), q.attr("dtype"));
        int32_t* words = writable<int32_t>(both);
        int32_t* above = words + b * widest;
        uint8_t* from = source ? writable<uint8_t>(sources) : nullptr;
        std::vector<int32_t> place(w);
        for (size_t i = 0; i < b; ++i) {
            const std::vector<int>& nodes = policy_.kept(i);
            for (size_t n = 0; n < widest; ++n) {
                const size_t at = i * widest + n;
                if (n >= nodes.size()) {
                    words[at] = 0, above[at] = -1;
                    if (from) from[at] = 0;
                    continue;
                }
                const size_t old = i * w + static_cast<size_t>(nodes[n]);
                place[static_cast<size_t>(nodes[n])] = static_cast<int32_t>(n);
                words[at] = tokens[old];
                above[at] = parents[old] < 0 ? -1 : place[static_cast<size_t>(parents[old])];
                if (from) from[at] = source[old];
            }
        }
        if (!q.is_none())
            for (size_t i = 0; i < b; ++i) {
                nb::object row = drawn[i], before = q[i];
                for (size_t n = 0; n < widest; ++n)
                    row[n] = n < policy_.kept(i).size() ? nb::object(before[policy_.kept(i)[n]]) : nb::object(nb::float_(0.0));
            }
        return drafts_(both[0], widths, both[1], drawn, nb::none(), sources, names);
    }

    template <class Item>
    static Item* writable(const nb::object& made) {
        Py_buffer view;
        if (PyObject_GetBuffer(made.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)) throw nb::python_error();
        Item* data = static_cast<Item*>(view.buf);
        PyBuffer_Release(&view);  // the array that was just made keeps its memory
        return data;
    }

    Policy policy_;
    nb::object sizes_, decision_, drafts_, empty_, int32_, uint8_;
    bool explain_;
    std::vector<nb::object> why_, undecided_;
    nb::dict numbers_, drafters_;  // of sources and drafters, by name
    std::vector<int> sources_;
    std::vector<Policy::View> views_;
};

}  // namespace outpace
