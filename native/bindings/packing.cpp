// What Python sees of a step's bookkeeping: rows packed into a batch, trees packed into drafts.
#include <optional>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace outpace {
namespace {

nb::object slice(const nb::object& array, Py_ssize_t begin, Py_ssize_t end) { return owned(PySequence_GetSlice(array.ptr(), begin, end)); }

struct NewTokens {  // of one row; `parents` null: a chain
    int32_t row, first;
    const int32_t *tokens, *parents;
    int count;
    bool wanted, last_only;
};

// token, row, position, parent, starts, wanted. One allocation holds all six.
nb::tuple packed(const std::vector<NewTokens>& rows) {
    Py_ssize_t n = 0, asked = 0;
    for (const NewTokens& its : rows) {
        n += its.count;
        if (its.wanted && its.count > 0) asked += its.last_only ? 1 : its.count;
    }
    const Py_ssize_t starts_from = 4 * n, wanted_from = starts_from + static_cast<Py_ssize_t>(rows.size()) + 1, size = wanted_from + asked;
    const IntArray all({size});
    int32_t *to = all.data, *row = to + n, *position = row + n, *parent = position + n, *start = to + starts_from, *want = to + wanted_from;
    int32_t at = 0;
    *start++ = 0;
    for (const NewTokens& its : rows) {
        for (int k = 0; k < its.count; ++k) {
            const int32_t above = its.parents ? its.parents[k] : k - 1;
            if (above < -1 || above >= k)
                throw nb::value_error(
                    ("node " + std::to_string(k) + " has parent " + std::to_string(above) + ", which is not a node before it").c_str());
            to[at + k] = its.tokens[k];
            row[at + k] = its.row;
            position[at + k] = above < 0 ? its.first : position[at + above] + 1;
            parent[at + k] = above;
            if (its.wanted && (!its.last_only || k == its.count - 1)) *want++ = at + k;
        }
        at += its.count;
        *start++ = at;
    }
    return nb::make_tuple(slice(all.object, 0, n), slice(all.object, n, 2 * n), slice(all.object, 2 * n, 3 * n),
        slice(all.object, 3 * n, 4 * n), slice(all.object, starts_from, wanted_from), slice(all.object, wanted_from, size));
}

bool truth(const nb::list& list, size_t i) {
    const int said = PyObject_IsTrue(PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i)));
    if (said < 0) throw nb::python_error();
    return said != 0;
}

int32_t number(const nb::list& list, size_t i) {
    return static_cast<int32_t>(whole(PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i))));
}

nb::tuple pack_batch(const nb::list& rows, const nb::list& tokens, const nb::list& starts_at, const nb::list& wanted, const nb::list& trees,
    bool last_only) {
    const size_t b = rows.size();
    if (tokens.size() != b || starts_at.size() != b || wanted.size() != b || trees.size() != b)
        throw nb::value_error("rows, tokens, starts_at, wanted and parents differ in length");
    std::vector<std::optional<IntCopy>> token(b), tree(b);
    std::vector<NewTokens> each;
    for (size_t i = 0; i < b; ++i) {
        token[i].emplace(PyList_GetItem(tokens.ptr(), static_cast<Py_ssize_t>(i)));
        PyObject* shape = PyList_GetItem(trees.ptr(), static_cast<Py_ssize_t>(i));
        if (shape != Py_None) {
            tree[i].emplace(shape);
            if (tree[i]->size() != token[i]->size()) throw nb::value_error("a row's tokens and parents differ in length");
        }
        each.push_back({number(rows, i), number(starts_at, i), token[i]->data(), tree[i] ? tree[i]->data() : nullptr, token[i]->size(),
            truth(wanted, i), last_only});
    }
    return packed(each);
}

// A list that is an attribute of a Tree.
nb::object list_of(PyObject* tree, PyObject* name) {
    nb::object list = owned(PyObject_GetAttr(tree, name));
    if (!PyList_Check(list.ptr())) throw nb::type_error("a tree's tokens, parents, gains and sources are lists");
    return list;
}

// Tokens, widths, parents (None: chains), confidence, source (None: one source).
nb::tuple pack_trees(const nb::list& trees, bool sourced) {
    const auto b = static_cast<Py_ssize_t>(trees.size());
    std::vector<nb::object> lists[3];
    std::vector<nb::object>&tokens = lists[0], &parents = lists[1], &gains = lists[2];
    Py_ssize_t w = 0;
    for (Py_ssize_t i = 0; i < b; ++i) {
        PyObject* tree = PyList_GetItem(trees.ptr(), i);
        tokens.push_back(list_of(tree, Names::get().tokens));
        parents.push_back(list_of(tree, Names::get().parents));
        gains.push_back(list_of(tree, Names::get().gains));
        const Py_ssize_t k = PyList_Size(tokens.back().ptr());
        if (PyList_Size(parents.back().ptr()) != k || PyList_Size(gains.back().ptr()) != k)
            throw nb::value_error("a tree's lists differ in length");
        w = std::max(w, k);
    }
    const IntArray token({b, w}), width({b}), parent({b, w});
    const Array<float> confidence(Names::get().float32, {b, w});
    std::optional<Array<uint8_t>> source;
    if (sourced) source.emplace(Names::get().uint8, std::initializer_list<Py_ssize_t>{b, w});
    bool chains = true;
    for (Py_ssize_t i = 0; i < b; ++i) {
        PyObject *its = tokens[static_cast<size_t>(i)].ptr(), *above = parents[static_cast<size_t>(i)].ptr(),
                 *gain = gains[static_cast<size_t>(i)].ptr();
        const Py_ssize_t k = PyList_Size(its);
        nb::object sources;
        if (sourced) {
            sources = list_of(PyList_GetItem(trees.ptr(), i), Names::get().sources);
            if (PyList_Size(sources.ptr()) != k) throw nb::value_error("a tree's lists differ in length");
        }
        width.data[i] = static_cast<int32_t>(k);
        for (Py_ssize_t n = 0; n < w; ++n) {
            const Py_ssize_t at = i * w + n;
            const bool real = n < k;
            token.data[at] = real ? static_cast<int32_t>(whole(PyList_GetItem(its, n))) : 0;
            parent.data[at] = real ? static_cast<int32_t>(whole(PyList_GetItem(above, n))) : -1;
            chains = chains && (!real || parent.data[at] == n - 1);
            const double value = real ? PyFloat_AsDouble(PyList_GetItem(gain, n)) : 0.0;
            if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
            confidence.data[at] = static_cast<float>(value);
            if (!sourced) continue;
            const long number = real ? whole(PyList_GetItem(sources.ptr(), n)) : 0;
            if (number < 0 || number > 255) throw nb::value_error("a source's number does not fit uint8");
            source->data[at] = static_cast<uint8_t>(number);
        }
    }
    return nb::make_tuple(
        token.object, width.object, chains ? nb::none() : parent.object, confidence.object, source ? source->object : nb::none());
}

}  // namespace

void bind_packing(nb::module_& m) {
    m.def("pack_batch", &pack_batch, "rows"_a, "tokens"_a, "starts_at"_a, "wanted"_a, "trees"_a, "last_only"_a);
    m.def("pack_trees", &pack_trees, "trees"_a, "sourced"_a);
}

}  // namespace outpace
