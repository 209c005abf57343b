// What Python sees of EAGLE's network, and of its rows' entries.
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "bindings/learned.h"
#include "drafting/learned.h"
#include "weights/pack.h"

namespace outpace {
namespace {

Matrix gathered(Arena& arena, const Matrix& m, const Ints& ids) {
    const std::vector<int32_t> rows = copied(ids);
    if (rows.empty()) throw std::invalid_argument("no rows to gather");
    for (const int32_t id : rows)
        if (id < 0 || id >= m.rows)
            throw std::invalid_argument("row " + std::to_string(id) + " is not one of the matrix's " + std::to_string(m.rows));
    nb::gil_scoped_release release;
    return gather(arena, m, rows.data(), static_cast<int>(rows.size()));
}

void make_eagle(
    Eagle* self, std::shared_ptr<Model> model, const Matrix& fuse, const std::vector<Floats>& norms, const Ints& tokens, bool norm_output) {
    std::vector<std::vector<float>> each;
    for (const Floats& norm : norms) each.push_back(values_of(norm));
    new (self) Eagle(std::move(model), fuse, std::move(each), copied(tokens), norm_output);
}

// (the target's row, tokens [n], hidden states [n, layers, hidden], nodes, levels, branch, noise): see learned.h.
Eagle::Ask ask_of(Eagle& eagle, const nb::tuple& given, DraftNetwork::Taken& taken, std::vector<States3>& kept) {
    if (given.size() != 7) throw std::invalid_argument("an ask has 7 parts, not " + std::to_string(given.size()));
    const States3& states = kept.emplace_back(nb::cast<States3>(given[2]));  // whatever another thread does to the list
    fits(eagle, states);
    Eagle::Ask ask{taken.row(nb::cast<int64_t>(given[0])), copied(nb::cast<Ints>(given[1])), states.data()};
    ask.nodes = nb::cast<int>(given[3]);
    ask.levels = nb::cast<int>(given[4]);
    ask.branch = nb::cast<int>(given[5]);
    ask.sampling = noise_of(given[6]);
    if (ask.tokens.size() != states.shape(0))
        throw std::invalid_argument(std::to_string(ask.tokens.size()) + " tokens and the hidden states of " +
                                    std::to_string(states.shape(0)) + " differ in length");
    return ask;
}

// tokens [B, W], widths [B], parents [B, W] (None: chains), confidence [B, W].
nb::tuple draft(Eagle& eagle, const nb::list& described) {
    std::vector<States3> kept;
    DraftNetwork::Taken taken(eagle);
    std::vector<Eagle::Ask> asks;
    for (const nb::handle ask : described) asks.push_back(ask_of(eagle, nb::cast<nb::tuple>(ask), taken, kept));
    std::vector<Eagle::Draft> drafts;
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(eagle.model().lock());
        drafts = eagle.draft(asks);
    }
    taken.keep();
    const auto b = static_cast<Py_ssize_t>(drafts.size());
    size_t w = 0;
    for (const Eagle::Draft& draft : drafts) w = std::max(w, draft.tokens.size());
    const auto width = static_cast<Py_ssize_t>(w);
    const IntArray tokens({b, width}), widths({b}), parents({b, width});
    const Array<float> confidence(Names::get().float32, {b, width});
    bool chains = true;
    for (size_t i = 0; i < drafts.size(); ++i) {
        const Eagle::Draft& draft = drafts[i];
        widths.data[i] = static_cast<int32_t>(draft.tokens.size());
        for (size_t n = 0; n < w; ++n) {
            const bool real = n < draft.tokens.size();
            tokens.data[i * w + n] = real ? draft.tokens[n] : 0;
            parents.data[i * w + n] = real ? draft.parents[n] : -1;
            confidence.data[i * w + n] = real ? draft.chances[n] : 0.0f;
            chains = chains && (!real || draft.parents[n] == static_cast<int32_t>(n) - 1);
        }
    }
    return nb::make_tuple(tokens.object, widths.object, chains ? nb::none() : parents.object, confidence.object);
}

nb::object fuse(Eagle& eagle, const States3& states) {
    const size_t n = states.shape(0), hidden = static_cast<size_t>(eagle.model().hidden());
    fits(eagle, states);
    std::vector<float> out(n * hidden);
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(eagle.model().lock());
        eagle.fuse(states.data(), static_cast<int>(n), out.data());
    }
    return numpy(std::move(out), {n, hidden});
}

nb::dict timings(Eagle& eagle) {
    const auto seconds = [&eagle] {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(eagle.model().lock());
        return eagle.take_timings();
    }();
    nb::dict named;
    for (int i = 0; i < Eagle::kPhases; ++i) named[Eagle::kPhaseNames[i]] = seconds[static_cast<size_t>(i)];
    return named;
}

Entries::Row& row_of(EagleRows& rows, int64_t row) {
    Entries::Row* found = rows.entries().find(row);
    if (!found) throw nb::key_error(std::to_string(row).c_str());
    return *found;
}

// Entries `first` ..: their tokens [n] and hidden states [n, layers, hidden], in the network's order. What is known is left out.
void append(EagleRows& rows, int64_t row, int first, const nb::object& tokens, const States3& states) {
    Entries& entries = rows.entries();
    const IntCopy ids(tokens.ptr());
    const size_t wide = entries.wide();
    if (states.shape(1) * states.shape(2) != wide) throw std::invalid_argument("hidden states are of other layers than the network reads");
    Entries::Row& to = entries.at(row);
    const int known = to.end(), n = std::min(ids.size(), static_cast<int>(states.shape(0)));
    for (int i = std::max(0, known - first); i < n; ++i)
        std::memcpy(entries.append(to, first + i, ids.data()[i]), states.data() + static_cast<size_t>(i) * wide, wide * sizeof(float));
}

Entries::Row& unread_row(EagleRows& rows, int64_t row, int n) {
    Entries::Row& found = row_of(rows, row);
    if (n < 0 || n > found.waiting())
        throw std::invalid_argument(std::to_string(n) + " entries, where " + std::to_string(found.waiting()) + " are unread");
    return found;
}

// The first n unread entries: their tokens [n] and hidden states [n, layers, hidden].
nb::tuple unread(EagleRows& rows, int64_t row, int n) {
    const Entries::Row& from = unread_row(rows, row, n);
    const size_t count = static_cast<size_t>(n), wide = rows.entries().wide(), layers = rows.width();
    return nb::make_tuple(numpy(std::vector<int32_t>(from.tokens.begin(), from.tokens.begin() + n), {count}),
        numpy(std::vector<float>(from.states.begin(), from.states.begin() + static_cast<std::ptrdiff_t>(count * wide)),
            {count, layers, wide / layers}));
}

std::vector<int64_t> numbers(const EagleRows& rows) {
    std::vector<int64_t> found;
    for (const auto& [row, known] : rows.entries().rows()) found.push_back(row);
    return found;
}

void bind_rows(nb::module_& m) {
    nb::class_<EagleRows, NativeDrafter>(m, "EagleRows")
        .def("__init__",
            [](EagleRows* self, Eagle& eagle, std::vector<int> layers, int branch, int most_levels, int fixed_levels, int catch_up,
                int max_length) {
        if (layers.empty() || branch < 1 || branch > kMostBranch || most_levels > kMostLevels || catch_up < 1)
            throw std::invalid_argument("rows of an EAGLE drafter have layers, branches and a bound of entries that wait");
        new (self) EagleRows(eagle, std::move(layers), {branch, most_levels, fixed_levels, catch_up, max_length});
    },
            "eagle"_a, "layers"_a, "branch"_a, "most_levels"_a, "fixed_levels"_a, "catch_up"_a, "max_length"_a, nb::keep_alive<1, 2>())
        .def("__contains__", [](EagleRows& x, int64_t row) { return x.entries().find(row) != nullptr; }, "row"_a)
        .def("rows", &numbers)
        .def("append", &append, "row"_a, "first"_a, "tokens"_a, "states"_a)
        .def("end", [](EagleRows& x, int64_t row) { return row_of(x, row).end(); }, "row"_a)
        .def("read", [](EagleRows& x, int64_t row) { return row_of(x, row).read(); }, "row"_a)
        .def("waiting", [](EagleRows& x, int64_t row) { return row_of(x, row).waiting(); }, "row"_a)
        .def("unread", &unread, "row"_a, "n"_a)
        .def("has_read", [](EagleRows& x, int64_t row, int n) { x.entries().has_read(unread_row(x, row, n), n); }, "row"_a, "n"_a)
        .def("unread_last", [](EagleRows& x, int64_t row) { return x.entries().unread_last(row_of(x, row)); }, "row"_a)
        .def("fork",
            [](EagleRows& x, int64_t src, int64_t dst, int known) {
        row_of(x, src);
        x.entries().fork(src, dst, known);
    }, "src"_a, "dst"_a, "known"_a)
        .def("retire", [](EagleRows& x, int64_t row) { x.entries().retire(row); }, "row"_a)
        .def("release", [](EagleRows& x, int64_t row) { x.entries().release(row); }, "row"_a);
}

}  // namespace

void bind_eagle(nb::module_& m) {
    nb::exception<NotFinite>(m, "NotFinite", PyExc_ArithmeticError);
    m.def("gather", &gathered, "arena"_a, "matrix"_a, "ids"_a);
    nb::class_<Eagle>(m, "Eagle")
        .def("__init__", &make_eagle, "model"_a, "fuse"_a, "norms"_a, "tokens"_a, "norm_output"_a)
        .def_prop_ro("bytes", &Eagle::bytes)
        .def("draft", &draft, "asks"_a)
        .def("fuse", &fuse, "states"_a)
        .def("row", &Eagle::row, "of"_a)
        .def("take", &Eagle::take, "of"_a)  // these two take the lock and keep the GIL: who has the lock does not wait for it
        .def("drop", &Eagle::drop, "of"_a)
        .def_prop_ro("rows", &Eagle::rows)
        .def("exchange", &Eagle::exchange, "other"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("take_timings", &timings);
    bind_rows(m);
}

}  // namespace outpace
