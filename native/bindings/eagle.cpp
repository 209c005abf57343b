// What Python sees of EAGLE's network, and of its rows' entries.
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

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
    return without_gil([&] { return gather(arena, m, rows.data(), static_cast<int>(rows.size())); });
}

void make_eagle(
    Eagle* self, std::shared_ptr<Model> model, const Matrix& fuse, const std::vector<Floats>& norms, const Ints& tokens, bool norm_output) {
    new (self) Eagle(std::move(model), fuse, values_of(norms), copied(tokens), norm_output);
}

// (the target's row, tokens [n], hidden states [n, layers, hidden], nodes, levels, branch, noise, floor): see learned.h.
using EagleAsk = std::tuple<int64_t, Ints, States3, int, int, int, Noise, double>;

ListOf<TupleOf<std::vector<int>, std::vector<int>, std::vector<double>, int>> draft(Eagle& eagle, const std::vector<EagleAsk>& described) {
    DraftNetwork::Taken taken(eagle);
    std::vector<Eagle::Ask> asks;
    for (const auto& [row, tokens, states, nodes, levels, branch, noise, floor] : described) {
        fits(eagle, states, tokens, "tokens");
        asks.push_back({taken.row(row), copied(tokens), states.data(), nodes, levels, branch, sampling_of(noise), floor});
    }
    const auto drafts = without_gil([&] { return eagle.draft(asks); });
    taken.keep();
    nb::list found;
    for (const Draft& draft : drafts) found.append(nb::make_tuple(draft.tokens, draft.parents, draft.gains, draft.levels));
    return found;
}

F32 fuse(Eagle& eagle, const States3& states) {
    fits(eagle, states);
    return numpy(without_gil([&] { return eagle.fuse(states.data(), static_cast<int>(states.shape(0))); }),
        {states.shape(0), static_cast<size_t>(eagle.model().hidden())});
}

EagleRows::Row& row_of(EagleRows& rows, int64_t row) {
    EagleRows::Row* found = rows.find(row);
    if (!found) throw nb::key_error(std::to_string(row).c_str());
    return *found;
}

// Entries `first` ..: their tokens [n] and hidden states [n, layers, hidden], in the network's order. What is known is left out.
void append(EagleRows& rows, int64_t row, int first, const I32& tokens, const States3& states) {
    const IntCopy ids(tokens.ptr());
    const size_t wide = rows.wide();
    if (states.shape(1) * states.shape(2) != wide) throw std::invalid_argument("hidden states are of other layers than the network reads");
    const int known = rows.made(row).end(), n = std::min(ids.size(), static_cast<int>(states.shape(0)));
    for (int i = std::max(0, known - first); i < n; ++i)
        std::memcpy(rows.append(row, first + i, ids.data()[i]), states.data() + static_cast<size_t>(i) * wide, wide * sizeof(float));
}

EagleRows::Row& unread_row(EagleRows& rows, int64_t row, int n) {
    EagleRows::Row& found = row_of(rows, row);
    if (n < 0 || n > found.waiting())
        throw std::invalid_argument(std::to_string(n) + " entries, where " + std::to_string(found.waiting()) + " are unread");
    return found;
}

// The first n unread entries: their tokens [n] and hidden states [n, layers, hidden].
TupleOf<I32, F32> unread(EagleRows& rows, int64_t row, int n) {
    const EagleRows::Row& from = unread_row(rows, row, n);
    const size_t count = static_cast<size_t>(n), wide = rows.wide(), layers = rows.width();
    return nb::make_tuple(numpy(std::vector<int32_t>(from.unread_tokens(), from.unread_tokens() + n), {count}),
        numpy(std::vector<float>(rows.unread_states(from), rows.unread_states(from) + count * wide), {count, layers, wide / layers}));
}

void bind_rows(nb::module_& m) {
    nb::class_<EagleRows, NativeDrafter>(m, "EagleRows",
        "What drafters/learned/eagle.py does with the entries of its rows, and those: see Entries in drafters/learned/entries.py. Levels: "
        "-1, as many as are asked for. Raises ValueError, KeyError.")
        .def("__init__",
            [](EagleRows* self, Eagle& eagle, std::vector<int> layers, int branch, int most_levels, int fixed_levels, int deepest,
                int catch_up, int max_length) {
        if (layers.empty() || branch < 1 || branch > kMostBranch || most_levels > kMostLevels || catch_up < 1)
            throw std::invalid_argument("rows of an EAGLE drafter have layers, branches and a bound of entries that wait");
        new (self) EagleRows(eagle, std::move(layers), {branch, most_levels, fixed_levels, deepest, catch_up, max_length});
    },
            "eagle"_a, "layers"_a, "branch"_a, "most_levels"_a, "fixed_levels"_a, "deepest"_a, "catch_up"_a, "max_length"_a,
            nb::keep_alive<1, 2>())
        .def("__contains__", [](EagleRows& x, int64_t row) { return x.find(row) != nullptr; }, "row"_a)
        .def("rows", [](EagleRows& x) { return keys_of(x.rows()); })
        .def("append", &append, "row"_a, "first"_a, "tokens"_a, "states"_a)
        .def("end", [](EagleRows& x, int64_t row) { return row_of(x, row).end(); }, "row"_a)
        .def("read", [](EagleRows& x, int64_t row) { return row_of(x, row).read(); }, "row"_a)
        .def("waiting", [](EagleRows& x, int64_t row) { return row_of(x, row).waiting(); }, "row"_a)
        .def("unread", &unread, "row"_a, "n"_a)
        .def("has_read", [](EagleRows& x, int64_t row, int n) { x.has_read(unread_row(x, row, n), n); }, "row"_a, "n"_a)
        .def("unread_last", [](EagleRows& x, int64_t row) { return x.unread_last(row_of(x, row)); }, "row"_a)
        .def("fork",
            [](EagleRows& x, int64_t src, int64_t dst, int known) {
        row_of(x, src);
        x.fork(src, dst, known);
    }, "src"_a, "dst"_a, "known"_a)
        .def("retire", &EagleRows::retire, "row"_a)
        .def("release", &EagleRows::release, "row"_a);
}

}  // namespace

void bind_eagle(nb::module_& m) {
    nb::exception<NotFinite>(m, "NotFinite", PyExc_ArithmeticError);
    m.def("gather", &gathered, "arena"_a, "matrix"_a, "ids"_a,
        "Rows `ids` of a matrix, with the same values, as a matrix. Raises ValueError.");
    nb::class_<Eagle>(
        m, "Eagle", "An EAGLE-3 drafter's network; see native/model/eagle.h. Raises ValueError, IndexError, MemoryLimit, NotFinite.")
        .def("__init__", &make_eagle, "model"_a, "fuse"_a, "norms"_a, "tokens"_a, "norm_output"_a,
            "model: its first layer has an `embed_norm`. tokens int32 [D]: the target's ids, ascending.")
        .def_prop_ro("bytes", &Eagle::bytes, "Of its weights, the embedding aside.")
        .def("draft", &draft, "asks"_a,
            "Append entries to the target's rows and draft after each one's last: (row, tokens [n], hidden states [n, T, H], nodes (0: "
            "none), levels, branch, None or temperature, seed, sample and output index, floor). Tokens, parents and path probabilities of "
            "each ask's nodes, and the draft's levels.")
        .def("fuse", &fuse, "states"_a, "Features [n, H] of hidden states [n, T, H].")
        .def("row", &Eagle::row, "of"_a, "The model's row of a row of the target; -1: it is not there.")
        // these two take the lock and keep the GIL: who has the lock does not wait for it
        .def("take", &Eagle::take, "of"_a, "Make it where it is not there; whether that was so.")
        .def("drop", &Eagle::drop, "of"_a)
        .def_prop_ro("rows", &Eagle::rows);
    bind_rows(m);
}

}  // namespace outpace
