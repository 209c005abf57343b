// What Python sees of a learned drafter's network, and of its rows' entries.
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "drafting/learned.h"
#include "model/eagle.h"
#include "weights/pack.h"

namespace outpace {
namespace {

using States3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

Matrix gathered(Arena& arena, const Matrix& m, const Ints& ids) {
    const std::vector<int32_t> its = copied(ids);
    if (its.empty()) throw std::invalid_argument("no rows to gather");
    for (const int32_t id : its)
        if (id < 0 || id >= m.rows) throw std::invalid_argument("row " + std::to_string(id) + " is not one of the matrix's " + std::to_string(m.rows));
    nb::gil_scoped_release release;
    return gather(arena, m, its.data(), static_cast<int>(its.size()));
}

void make_eagle(Eagle* self, std::shared_ptr<Model> model, const Matrix& fuse, const std::vector<Floats>& norms, const Ints& tokens,
                bool norm_output) {
    std::vector<std::vector<float>> its;
    for (const Floats& norm : norms) its.emplace_back(norm.data(), norm.data() + norm.size());
    new (self) Eagle(std::move(model), fuse, std::move(its), copied(tokens), norm_output);
}

void fits(const Eagle& eagle, const States3& taps, int hidden) {
    if (static_cast<int>(taps.shape(1)) != eagle.taps() || static_cast<int>(taps.shape(2)) != hidden)
        throw std::invalid_argument("taps are [n, " + std::to_string(taps.shape(1)) + ", " + std::to_string(taps.shape(2)) + "], but must be [n, " +
                                    std::to_string(eagle.taps()) + ", " + std::to_string(hidden) + "]");
}

// (row, tokens, taps, nodes, levels, branch, None or (temperature, seed, sample, index))
Eagle::Ask ask_of(Eagle& eagle, const nb::tuple& d, std::vector<States3>& kept) {
    if (d.size() != 7) throw std::invalid_argument("an ask has 7 parts, not " + std::to_string(d.size()));
    const States3 taps = nb::cast<States3>(d[2]);
    kept.push_back(taps);  // whatever another thread does to the list
    fits(eagle, taps, eagle.model().hidden());
    Eagle::Ask ask{nb::cast<int>(d[0]), copied(nb::cast<Ints>(d[1])), taps.data(), nb::cast<int>(d[3]), nb::cast<int>(d[4]), nb::cast<int>(d[5]),
                   Sampling{}};
    if (ask.tokens.size() != taps.shape(0))
        throw std::invalid_argument(std::to_string(ask.tokens.size()) + " tokens and the taps of " + std::to_string(taps.shape(0)) + " differ in length");
    if (d[6].is_none()) return ask;
    const nb::tuple noise = nb::cast<nb::tuple>(d[6]);
    ask.sampling.temperature = nb::cast<double>(noise[0]);
    ask.sampling.seed = nb::cast<uint64_t>(noise[1]);
    ask.sampling.sample = nb::cast<uint32_t>(noise[2]);
    ask.sampling.index = nb::cast<uint32_t>(noise[3]);
    return ask;
}

// tokens [B, W], widths [B], parents [B, W] (None: chains), confidence [B, W].
nb::tuple draft(Eagle& eagle, const nb::list& described) {
    std::vector<States3> kept;
    std::vector<Eagle::Ask> asks;
    for (const nb::handle ask : described) asks.push_back(ask_of(eagle, nb::cast<nb::tuple>(ask), kept));
    std::vector<Eagle::Draft> drafts;
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(eagle.model().lock());
        drafts = eagle.draft(asks);
    }
    const auto b = static_cast<Py_ssize_t>(drafts.size());
    size_t w = 0;
    for (const Eagle::Draft& its : drafts) w = std::max(w, its.tokens.size());
    const auto width = static_cast<Py_ssize_t>(w);
    const IntArray tokens({b, width}), widths({b}), parents({b, width});
    const Array<float> confidence(Names::get().float32, {b, width});
    bool chains = true;
    for (size_t i = 0; i < drafts.size(); ++i) {
        const Eagle::Draft& its = drafts[i];
        widths.data[i] = static_cast<int32_t>(its.tokens.size());
        for (size_t n = 0; n < w; ++n) {
            const bool real = n < its.tokens.size();
            tokens.data[i * w + n] = real ? its.tokens[n] : 0;
            parents.data[i * w + n] = real ? its.parents[n] : -1;
            confidence.data[i * w + n] = real ? its.chances[n] : 0.0f;
            chains = chains && (!real || its.parents[n] == static_cast<int32_t>(n) - 1);
        }
    }
    return nb::make_tuple(tokens.object, widths.object, chains ? nb::none() : parents.object, confidence.object);
}

nb::object fuse(Eagle& eagle, const States3& taps) {
    const size_t n = taps.shape(0), hidden = static_cast<size_t>(eagle.model().hidden());
    fits(eagle, taps, eagle.model().hidden());
    std::vector<float> out(n * hidden);
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(eagle.model().lock());
        eagle.fuse(taps.data(), static_cast<int>(n), out.data());
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
    Entries::Row* its = rows.entries().find(row);
    if (!its) throw nb::key_error(std::to_string(row).c_str());
    return *its;
}

// Entries `first` ..: their tokens [n] and taps [n, T, H], T in the network's order. What is known already is left out.
void append(EagleRows& rows, int64_t row, int first, const nb::object& tokens, const States3& taps) {
    Entries& entries = rows.entries();
    const IntCopy its(tokens.ptr());
    if (taps.shape(1) * taps.shape(2) != entries.wide()) throw std::invalid_argument("taps are of other layers than the network reads");
    Entries::Row& to = entries.at(row);
    const int known = to.end(), n = std::min(its.size(), static_cast<int>(taps.shape(0)));
    for (int i = 0; i < n; ++i)
        if (first + i >= known)
            std::memcpy(entries.append(to, first + i, its.data()[i]), taps.data() + static_cast<size_t>(i) * entries.wide(), entries.wide() * sizeof(float));
}

// The first n unread entries: their tokens [n] and taps [n, T, H].
nb::tuple unread(EagleRows& rows, int64_t row, int n) {
    const Entries::Row& its = row_of(rows, row);
    if (n < 0 || n > its.waiting()) throw std::invalid_argument(std::to_string(n) + " entries, where " + std::to_string(its.waiting()) + " are unread");
    const size_t count = static_cast<size_t>(n), wide = rows.entries().wide(), taps = rows.width();
    return nb::make_tuple(numpy(std::vector<int32_t>(its.tokens.begin(), its.tokens.begin() + n), {count}),
                          numpy(std::vector<float>(its.states.begin(), its.states.begin() + static_cast<std::ptrdiff_t>(count * wide)), {count, taps, wide / taps}));
}

void has_read(EagleRows& rows, int64_t row, int n) {
    Entries::Row& its = row_of(rows, row);
    if (n < 0 || n > its.waiting()) throw std::invalid_argument(std::to_string(n) + " entries, where " + std::to_string(its.waiting()) + " are unread");
    rows.entries().has_read(its, n);
}

std::vector<int64_t> numbers(const EagleRows& rows) {
    std::vector<int64_t> found;
    for (const auto& [row, its] : rows.entries().rows()) found.push_back(row);
    return found;
}

void bind_rows(nb::module_& m) {
    nb::class_<EagleRows, Lookup>(m, "EagleRows")
        .def("__init__",
             [](EagleRows* self, Eagle& eagle, std::vector<int> columns, int branch, int most_levels, int fixed_levels, int catch_up, int max_length) {
                 if (columns.empty() || branch < 1 || branch > kMostBranch || most_levels > kMostLevels || catch_up < 1)
                     throw std::invalid_argument("rows of an EAGLE drafter have layers, branches and a bound of entries that wait");
                 new (self) EagleRows(eagle, std::move(columns), {branch, most_levels, fixed_levels, catch_up, max_length});
             },
             "eagle"_a, "columns"_a, "branch"_a, "most_levels"_a, "fixed_levels"_a, "catch_up"_a, "max_length"_a, nb::keep_alive<1, 2>())
        .def("__contains__", [](EagleRows& x, int64_t row) { return x.entries().find(row) != nullptr; }, "row"_a)
        .def("rows", &numbers)
        .def("append", &append, "row"_a, "first"_a, "tokens"_a, "taps"_a)
        .def("end", [](EagleRows& x, int64_t row) { return row_of(x, row).end(); }, "row"_a)
        .def("read", [](EagleRows& x, int64_t row) { return row_of(x, row).read(); }, "row"_a)
        .def("waiting", [](EagleRows& x, int64_t row) { return row_of(x, row).waiting(); }, "row"_a)
        .def("unread", &unread, "row"_a, "n"_a)
        .def("has_read", &has_read, "row"_a, "n"_a)
        .def("unread_last", [](EagleRows& x, int64_t row) { return x.entries().unread_last(row_of(x, row)); }, "row"_a)
        .def("fork",
             [](EagleRows& x, int64_t src, int64_t dst, int known) {
                 row_of(x, src);
                 x.entries().fork(src, dst, known);
             },
             "src"_a, "dst"_a, "known"_a)
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
        .def("fuse", &fuse, "taps"_a)
        .def("row", &Eagle::row, "of"_a)
        .def("take", &Eagle::take, "of"_a)  // these two take the lock and keep the GIL: who has the lock does not wait for it
        .def("drop", &Eagle::drop, "of"_a)
        .def_prop_ro("rows", &Eagle::rows)
        .def("exchange", &Eagle::exchange, "other"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("take_timings", &timings);
    bind_rows(m);
}

}  // namespace outpace
