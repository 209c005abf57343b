// What Python sees of drafting: the drafters that look tokens up, and what they search.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <stdexcept>
#include <system_error>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/chooser.h"
#include "bindings/policy.h"
#include "drafting/composed.h"
#include "drafting/datastore.h"
#include "drafting/draft_model.h"
#include "drafting/merge.h"
#include "drafting/ngram.h"
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

Draft draft_of(const Lists& lists) {
    const auto& [tokens, parents, gains, sources] = lists;
    if (parents.size() != tokens.size() || gains.size() != tokens.size() || sources.size() != tokens.size())
        throw std::invalid_argument("a draft's lists differ in length");
    Draft draft{tokens, parents, gains, sources};
    if (!draft.parents_first()) throw std::invalid_argument("it proposed a tree in which a node stands before its parent");
    return draft;
}

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

// Rows that Python asks for: row, request, tokens of its prompt, committed tokens int32 [L], most nodes; and, for more than
// lookups, most depth (-1: as many as nodes), the floor, whether the policy chooses, whether it samples under rejection, and
// its chooser with its rules (None: greedy), and where it stands in a policy's step (None: it has no policy).
using Plain = TupleOf<int, int, int, I32, int>;
using Full = TupleOf<int, int, int, I32, int, int, double, bool, bool, int, std::optional<Named>, std::optional<InStep>>;

class AskedRows {
public:
    explicit AskedRows(const nb::sequence& rows) {
        for (const nb::handle row : rows) {
            const nb::tuple each = nb::borrow<nb::tuple>(row);
            if (each.size() != 5 && each.size() != 12) throw std::invalid_argument("a row has 5 or 12 fields");
            const IntView& view = tokens_.emplace_back(nb::handle(each[3]).ptr());
            asked.push_back({nb::cast<int64_t>(each[0]), nb::cast<int64_t>(each[1]), nb::cast<int64_t>(each[2]), view.data(),
                static_cast<size_t>(view.size()), nb::cast<int>(each[4])});
            if (!asked.back().n || asked.back().size < 1) throw std::invalid_argument("a row has a token, and is asked for a node");
            if (each.size() == 5) continue;
            Asked& full = asked.back();
            full.levels = nb::cast<int>(each[5]), full.floor = nb::cast<double>(each[6]);
            full.adaptive = nb::cast<bool>(each[7]), full.drawn = nb::cast<bool>(each[8]);
            full.start = nb::cast<int64_t>(each[9]);
            if (!each[11].is_none()) {
                const InStep& its = places_.emplace_back(nb::cast<InStep>(each[11]));
                full.policy = nb::cast<Policy*>(its.policy), full.place = its.place, full.sources = &its.sources;
            }
            const nb::object chooser = each[10];
            if (chooser.is_none()) continue;
            full.sampling = &samplings_.emplace_back(sampling_of(nb::cast<Named>(chooser)));
            full.edits = &edits_.emplace_back(edits_of(nb::cast<nb::list>(chooser["rules"])));
        }
    }
    AskedRows(const AskedRows&) = delete;

    std::vector<Asked> asked;

private:
    std::deque<IntView> tokens_;
    std::deque<Sampling> samplings_;
    std::deque<std::vector<Edit>> edits_;
    std::deque<InStep> places_;
};

std::vector<Lists> lists_of(const std::vector<Draft>& drafts) {
    std::vector<Lists> found;
    for (const Draft& draft : drafts) found.push_back(lists_of(draft));
    return found;
}

std::vector<Lists> trees_of(NativeDrafter& drafter, const SequenceOf<Plain>& rows) {
    const AskedRows given(rows);
    std::vector<Draft> drafts;
    drafter.propose(given.asked, drafts);
    return lists_of(drafts);
}

// A composition's slots, and the rows that they are for.
class BoundSlots {
public:
    BoundSlots(const ComposedDrafter& composed, const SequenceOf<Full>& rows)
        : composed_(composed), rows_(rows), slots_(composed, rows_.asked) {}

    std::vector<std::tuple<size_t, int, int, double>> wanted(size_t part) {
        asked_ = slots_.wanted(part, at_);
        part_ = part;
        std::vector<std::tuple<size_t, int, int, double>> found;
        for (size_t k = 0; k < at_.size(); ++k) found.emplace_back(at_[k], asked_[k].size, asked_[k].levels, asked_[k].floor);
        return found;
    }
    void ask(const std::vector<size_t>& which) {
        std::vector<Asked> asked;
        std::vector<size_t> at;
        for (const size_t k : which) asked.push_back(asked_.at(k)), at.push_back(at_[k]);
        if (!composed_.parts().at(part_).drafter) throw std::invalid_argument("this part is Python's");
        std::optional<nb::gil_scoped_release> release;
        if (composed_.parts()[part_].stepwise) release.emplace();
        slots_.ask(part_, asked, at);
    }
    void put(const std::vector<size_t>& which, const std::vector<Lists>& drafts, const std::optional<std::vector<int>>& levels) {
        if (drafts.size() != which.size() || (levels && levels->size() != which.size()))
            throw std::invalid_argument("it proposed for other rows than it was asked for");
        for (size_t k = 0; k < which.size(); ++k) {
            Draft draft = draft_of(drafts[k]);
            if (levels) draft.levels = (*levels)[k];
            slots_.put(part_, at_.at(which[k]), std::move(draft));
        }
    }
    std::pair<std::vector<Lists>, std::vector<int>> merged() {
        const std::vector<Draft> trees = slots_.merged();
        std::vector<int> levels;
        for (const Draft& tree : trees) levels.push_back(tree.levels);
        return {lists_of(trees), levels};
    }

private:
    const ComposedDrafter& composed_;
    const AskedRows rows_;
    ComposedDrafter::Slots slots_;
    size_t part_ = 0;
    std::vector<size_t> at_;
    std::vector<Asked> asked_;
};

void bind_composed(nb::module_& m) {
    nb::class_<ComposedDrafter, NativeDrafter>(m, "ComposedDrafter",
        "See native/drafting/composed.h. parts: native drafter (None: Python's), whether it is a fallback, draws, is stepwise.")
        .def("__init__",
            [](ComposedDrafter* self, const std::vector<std::tuple<std::optional<NativeDrafter*>, bool, bool, bool>>& parts) {
        std::vector<ComposedDrafter::Part> each;
        for (const auto& [drafter, fallback, draws, stepwise] : parts)
            each.push_back({drafter.value_or(nullptr), fallback, draws, stepwise});
        new (self) ComposedDrafter(std::move(each));
    }, "parts"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("order", [](const ComposedDrafter& x) { return x.order(); }, "The parts, as they are to be asked.");
    nb::class_<BoundSlots>(m, "Slots", "What a composition's parts propose for rows in one step. Raises ValueError, IndexError.")
        .def(nb::init<const ComposedDrafter&, const SequenceOf<Full>&>(), "composed"_a, "rows"_a, nb::keep_alive<1, 2>(),
            "rows: row, request, tokens of its prompt, committed tokens int32 [L], most nodes, most depth (-1: as many as nodes), floor, "
            "whether the policy chooses, whether it samples under rejection, its chooser with its rules (None: no native part that draws "
            "is asked for it), what `Rows.in_step` gave (None: it has no policy).")
        .def("wanted", &BoundSlots::wanted, "part"_a,
            "The rows that a part is asked for next, the nodes that are left for it, its levels and its floor.")
        .def("ask", &BoundSlots::ask, "which"_a, "The part is native, and drafts for these of the rows that it is asked for.")
        .def("put", &BoundSlots::put, "which"_a, "drafts"_a, "levels"_a.none(),
            "What the part, in Python, proposes for these of them: tokens, parents, gains and sources, and the forwards it took, if it "
            "says.")
        .def("merged", &BoundSlots::merged,
            "Tokens, parents, gains and sources (parts) of each row's draft, and its drafting forwards; -1: no part counts them.");
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
        .def("start", [](const DraftRows& x, int64_t row) { return x.rows.count(row) ? x.rows.at(row).start : 0; }, "row"_a,
            "The first of its tokens that were fed.")
        .def("put",
            [](DraftRows& x, int64_t row, int cached, const Ints& tokens, size_t start) { x.rows[row] = {cached, copied(tokens), start}; },
            "row"_a, "cached"_a, "tokens"_a, "start"_a = 0)
        .def("release", [](DraftRows& x, int64_t row) { x.rows.erase(row); }, "row"_a);
    nb::class_<ModelDrafter, NativeDrafter>(m, "ModelDrafter", "See native/drafting/draft_model.h.")
        .def(nb::init<std::shared_ptr<Model>, std::shared_ptr<DraftRows>, int, int, int, int, int>(), "model"_a, "rows"_a, "vocab"_a,
            "max_length"_a, "catch_up"_a, "least"_a, "piece"_a);
}

void bind_lookups(nb::module_& m) {
    nb::class_<NativeDrafter>(m, "NativeDrafter", "A drafter in C++; see native/drafting/drafter.h.")
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
    nb::class_<NgramLookup, NativeDrafter>(m, "NgramLookup", "See native/drafting/ngram.h. Raises ValueError.")
        .def(nb::init<int, int, int, std::vector<double>, double>(), "least"_a, "most"_a, "candidates"_a, "hit"_a, "older"_a);
    nb::class_<RetrievalLookup, NativeDrafter>(m, "RetrievalLookup")
        .def("__init__", [](RetrievalLookup* self, const HeldDatastore& held, int places, int least) {
        new (self) RetrievalLookup(held.store, places, least);
    }, "datastore"_a, "places"_a, "least"_a, nb::keep_alive<1, 2>());
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
        for (const Lists& lists : proposals) {
            drafts.push_back(draft_of(lists));
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
    bind_composed(m);
    bind_draft_model(m);
}

}  // namespace outpace
