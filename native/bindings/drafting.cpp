// What Python sees of drafting: the drafters that look tokens up, and what they search.
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <stdexcept>
#include <system_error>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "drafting/datastore.h"
#include "drafting/draft_model.h"
#include "drafting/lookups.h"
#include "drafting/merge.h"
#include "drafting/recycling.h"
#include "drafting/suffix.h"
#include "runtime/mapped.h"

namespace outpace {
namespace {

using Lists = std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<double>, std::vector<int>>;

TupleOf<std::vector<int32_t>, std::vector<int32_t>, std::vector<double>> tuple_of(const Draft& draft) {
    return nb::make_tuple(draft.tokens, draft.parents, draft.gains);
}

Lists lists_of(const Draft& draft) { return {draft.tokens, draft.parents, draft.gains, draft.sources}; }

using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SegmentArrays = std::tuple<Ints, Ints, Longs>;  // tokens, order, keys

// A datastore and the arrays that it reads.
struct HeldDatastore {
    HeldDatastore(std::vector<SegmentArrays> segments, std::vector<const Mapped*> files, VoteRules rules, int32_t vocab)
        : arrays(std::move(segments)), store(views(arrays), std::move(files), std::move(rules), vocab) {}

    static std::vector<Datastore::Segment> views(const std::vector<SegmentArrays>& arrays) {
        std::vector<Datastore::Segment> found;
        for (const auto& [tokens, order, keys] : arrays) {
            if (order.shape(0) != keys.shape(0)) throw std::invalid_argument("order and keys differ in length");
            found.push_back(
                {tokens.data(), static_cast<int64_t>(tokens.shape(0)), order.data(), keys.data(), static_cast<int64_t>(order.shape(0))});
        }
        return found;
    }

    std::vector<SegmentArrays> arrays;
    Datastore store;
};

std::vector<Lists> trees_of(NativeDrafter& drafter, const SequenceOf<TupleOf<int, int, int, I32, int>>& rows) {
    std::vector<Asked> asked;
    std::deque<IntView> tokens;
    for (const nb::handle row : rows) {
        const nb::tuple its = nb::borrow<nb::tuple>(row);
        if (its.size() != 5) throw std::invalid_argument("a row is (row, request, prompt, tokens, size)");
        const IntView& view = tokens.emplace_back(nb::handle(its[3]).ptr());
        asked.push_back({nb::cast<int64_t>(its[0]), nb::cast<int64_t>(its[1]), nb::cast<int64_t>(its[2]), view.data(),
            static_cast<size_t>(view.size()), nb::cast<int>(its[4])});
    }
    std::vector<Draft> drafts;
    drafter.propose(asked, drafts);
    std::vector<Lists> found;
    for (const Draft& draft : drafts) found.push_back(lists_of(draft));
    return found;
}

void bind_draft_model(nb::module_& m) {
    nb::class_<DraftRows>(m, "DraftRows", "By the target's row: a row of a draft model's cache, and the tokens fed there. Raises KeyError.")
        .def(nb::init<>())
        .def("cached",
            [](const DraftRows& x) {
        std::map<int64_t, int> found;
        for (const auto& [row, known] : x.rows) found[row] = known.cached;
        return found;
    })
        .def("tokens",
            [](const DraftRows& x, int64_t row) {
        const auto found = x.rows.find(row);
        if (found == x.rows.end()) throw nb::key_error(std::to_string(row).c_str());
        return numpy(std::vector<int32_t>(found->second.fed), {found->second.fed.size()});
    }, "row"_a)
        .def("put", [](DraftRows& x, int64_t row, int cached, const Ints& tokens) { x.rows[row] = {cached, copied(tokens)}; }, "row"_a,
            "cached"_a, "tokens"_a)
        .def("release", [](DraftRows& x, int64_t row) { x.rows.erase(row); }, "row"_a);
    nb::class_<ModelDrafter, NativeDrafter>(m, "ModelDrafter", "See native/drafting/draft_model.h.")
        .def(nb::init<std::shared_ptr<Model>, std::shared_ptr<DraftRows>, int, int, int>(), "model"_a, "rows"_a, "vocab"_a, "max_length"_a,
            "catch_up"_a);
}

// What drafts in steps that need no Python; see step.cpp.
void bind_lookups(nb::module_& m) {
    nb::class_<NativeDrafter>(m, "NativeDrafter", "A drafter in C++; see native/drafting/lookups.h.")
        .def("trees", &trees_of, "rows"_a,
            "rows: row, request, tokens of its prompt, committed tokens int32 [L], most nodes. Tokens, parents, gains and sources of a "
            "tree for each. Raises ValueError, RuntimeError.")
        .def_prop_ro("hidden_layers", [](const NativeDrafter& x) { return TuplesOf<int>(nb::cast(x.hidden_layers())); },
            "Layers of the target whose outputs it reads of what became final.")
        .def_prop_ro("stepwise", &NativeDrafter::stepwise, "Whether it takes a forward for every level.")
        .def_prop_ro(
            "ranks", &NativeDrafter::ranks, "How many of the target's likeliest tokens after each verified token `rank` takes in; 0: none.")
        .def("rank",
            [](NativeDrafter& x, int64_t row, const I32& tokens, const I32& ids) {
        const IntView token(tokens.ptr()), likeliest(ids.ptr(), 2);
        if (likeliest.size() != token.size() || likeliest.width() != x.ranks()) throw std::invalid_argument("ids are [tokens, ranks]");
        x.rank(row, token.data(), static_cast<size_t>(token.size()), likeliest.data());
    }, "row"_a, "tokens"_a, "ids"_a,
            "tokens int32 [n]: a row's pending token and its nodes; ids int32 [n, ranks]: what the target finds likeliest after each, best "
            "first, -1: none. Raises ValueError.");
    nb::class_<RecyclingLookup, NativeDrafter>(m, "RecyclingLookup", "See native/drafting/recycling.h. Raises ValueError.")
        .def(nb::init<int64_t, std::vector<double>, bool>(), "capacity"_a, "hit"_a, "shared"_a)
        .def("release", &RecyclingLookup::release, "row"_a)
        .def_prop_ro("lists", &RecyclingLookup::lists)
        .def("rows", &RecyclingLookup::rows)
        .def("after", &RecyclingLookup::after, "row"_a, "token"_a);
    nb::class_<NgramLookup, NativeDrafter>(m, "NgramLookup", "See native/drafting/lookups.h. Raises ValueError.")
        .def(nb::init<int, int, int, std::vector<double>, double>(), "least"_a, "most"_a, "candidates"_a, "hit"_a, "older"_a);
    nb::class_<RetrievalLookup, NativeDrafter>(m, "RetrievalLookup")
        .def("__init__", [](RetrievalLookup* self, const HeldDatastore& held, int places, int least) {
        new (self) RetrievalLookup(held.store, places, least);
    }, "datastore"_a, "places"_a, "least"_a, nb::keep_alive<1, 2>());
    nb::class_<ComposedDrafter, NativeDrafter>(m, "ComposedDrafter",
        "sure, deep: see is_sure of drafters/composed.py. Raises ValueError where parts and fallback differ in length, or more than one "
        "part is stepwise.")
        .def("__init__",
            [](ComposedDrafter* self, const std::vector<NativeDrafter*>& parts, const std::vector<bool>& fallback, double sure, int deep) {
        if (parts.size() != fallback.size()) throw std::invalid_argument("parts and fallback differ in length");
        std::vector<ComposedDrafter::Part> each;
        for (size_t j = 0; j < parts.size(); ++j) each.push_back({parts[j], fallback[j]});
        new (self) ComposedDrafter(std::move(each), sure, deep);
    }, "parts"_a, "fallback"_a, "sure"_a, "deep"_a, nb::keep_alive<1, 2>());
    nb::class_<SuffixRows, NativeDrafter>(
        m, "SuffixRows", "The indexes of rows, with `history` at most `capacity` tokens. Raises ValueError.")
        .def("__init__",
            [](SuffixRows* self, int64_t capacity, int most, int nearest, int few, std::vector<double> weights, double doubt, bool wide,
                SuffixIndex* history) {
        new (self) SuffixRows(capacity, most, {nearest, few, {std::move(weights), doubt}}, wide, history);
    },
            "capacity"_a, "most"_a, "nearest"_a, "few"_a, "weights"_a, "doubt"_a, "wide"_a, "history"_a.none(), nb::keep_alive<1, 9>())
        .def("bound", &SuffixRows::bound)
        .def("release", &SuffixRows::release, "row"_a)
        .def_prop_ro("places", &SuffixRows::places)
        .def("rows", [](const SuffixRows& x) -> nb::typed<nb::dict, int, TupleOf<int, int>> {
        nb::dict found;
        for (const SuffixRows::Row& row : x.rows()) found[nb::int_(row.row)] = nb::make_tuple(row.index->tokens().size(), row.known);
        return found;
    });
}

}  // namespace

void bind_drafting(nb::module_& m) {
    m.def("merge", [](const std::vector<Lists>& proposals, int budget) {
        std::vector<Draft> drafts;
        for (const auto& [tokens, parents, gains, sources] : proposals) {
            if (parents.size() != tokens.size() || gains.size() != tokens.size() || sources.size() != tokens.size())
                throw std::invalid_argument("a draft's lists differ in length");
            drafts.push_back({tokens, parents, gains, sources});
            drafts.back().assume();
        }
        return lists_of(merge(drafts, budget));
    }, "proposals"_a, "budget"_a);
    nb::class_<SuffixIndex>(
        m, "SuffixIndex", "The index of `suffix`: at most `capacity` tokens. See native/drafting/suffix.h. Raises ValueError.")
        .def("__init__",
            [](SuffixIndex* self, int64_t capacity, int most, int nearest, int few, std::vector<double> weights, double doubt) {
        new (self) SuffixIndex(capacity, most, {nearest, few, {std::move(weights), doubt}});
    }, "capacity"_a, "most"_a, "nearest"_a, "few"_a, "weights"_a, "doubt"_a)
        .def("__len__", [](const SuffixIndex& x) { return x.tokens().size(); })
        .def("append",
            [](SuffixIndex& x, const I32& tokens) {
        const IntView view(tokens.ptr());
        x.append(view.data(), static_cast<size_t>(view.size()));
    }, "tokens"_a)
        .def("shrink", &SuffixIndex::shrink, "n"_a)
        .def("tokens", [](const SuffixIndex& x) {
        return numpy(std::vector<int32_t>(x.tokens()), {x.tokens().size()});
    }).def("propose", [](const SuffixIndex& x, const I32& context, int budget, const std::vector<const SuffixIndex*>& others, bool wide) {
        if (std::count(others.begin(), others.end(), nullptr)) throw nb::type_error("others must be indices, not None");
        const IntView view(context.ptr());
        return tuple_of(x.propose(view.data(), static_cast<size_t>(view.size()), budget, others, wide));
    }, "context"_a, "budget"_a, "others"_a, "wide"_a);
    nb::class_<Mapped>(m, "Mapped",
        "A file's bytes in place. What the file loses meanwhile reads as zeros, and `torn` says so; without this, reading it would end the "
        "process. Raises OSError.")
        .def("__init__",
            [](Mapped* self, const std::string& path) {
        try {
            new (self) Mapped(path);
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
            throw nb::python_error();
        }
    }, "path"_a)
        .def_prop_ro("bytes", [](nb::handle_t<Mapped> self) -> U8 {
        const auto& file = nb::cast<const Mapped&>(self);
        const size_t shape[] = {file.size()};
        return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(file.data(), 1, shape, self));
    }).def_prop_ro("torn", &Mapped::torn);
    nb::class_<HeldDatastore>(m, "Datastore",
        "The search of `retrieval`: tokens, order and keys of segments, which it keeps; files: where they lie. Raises ValueError, and "
        "RuntimeError in a search where a file was cut short while it was open.")
        .def("__init__",
            [](HeldDatastore* self, std::vector<SegmentArrays> segments, std::vector<double> weights, double doubt, int32_t vocab,
                const std::vector<const Mapped*>& files) {
        new (self) HeldDatastore(std::move(segments), files, {std::move(weights), doubt}, vocab);
    },
            "segments"_a, "weights"_a, "doubt"_a, "vocab"_a, "files"_a = std::vector<const Mapped*>())
        .def("propose", [](const HeldDatastore& x, const Ints& context, int places, int least, int budget) {
        return tuple_of(x.store.propose(context.data(), context.shape(0), places, least, budget));
    }, "context"_a, "places"_a, "least"_a, "budget"_a);
    bind_lookups(m);
    bind_draft_model(m);
}

}  // namespace outpace
