// What Python sees of drafting: searches for `ngram`, `suffix` and `retrieval`, and the policy.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>

#include "bindings/bindings.h"
#include "drafting/datastore.h"
#include "drafting/lookup.h"
#include "drafting/merge.h"
#include "drafting/policy.h"
#include "drafting/suffix.h"

namespace outpace {
namespace {

nb::tuple tuple_of(const TokenTree& tree) { return nb::make_tuple(tree.tokens, tree.parents, tree.gains); }

using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SegmentArrays = std::tuple<Ints, Ints, Longs>;  // tokens, order, keys

// A datastore and the arrays that it reads.
struct HeldDatastore {
    HeldDatastore(std::vector<SegmentArrays> segments, VoteRules rules)
        : arrays(std::move(segments)), store(views(arrays), std::move(rules)) {}

    static std::vector<Datastore::Segment> views(const std::vector<SegmentArrays>& arrays) {
        std::vector<Datastore::Segment> found;
        for (const auto& [tokens, order, keys] : arrays) {
            if (order.shape(0) != keys.shape(0)) throw std::invalid_argument("order and keys differ in length");
            found.push_back({tokens.data(), static_cast<int64_t>(tokens.shape(0)), order.data(), keys.data(),
                             static_cast<int64_t>(order.shape(0))});
        }
        return found;
    }

    std::vector<SegmentArrays> arrays;
    Datastore store;
};

using TreeLists = std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<double>, std::vector<int>>;

template <class T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using MaybeTable = std::optional<Table<T>>;

PolicyRules rules_of(const nb::dict& d) {
    const auto number = [&d](const char* name) { return nb::cast<double>(d[name]); };
    const auto whole = [&d](const char* name) { return nb::cast<int>(d[name]); };
    return {nb::cast<std::vector<double>>(d["edges"]),
            whole("levels"), whole("fade_every"),
            number("unknown"), number("strength"), number("memory"), number("fade"), number("rate"), number("limit"),
            whole("window"), whole("furthest"),
            number("fading"), number("alone"), number("together"),
            number("explore"), number("harm"), number("allowance"), number("forgiven"),
            whole("first_tries"), whole("patience"), whole("longest_wait"),
            whole("least_reach"), whole("sampled"), whole("fresh"),
            number("horizon")};
}

template <class T>
const T* pointer(const MaybeTable<T>& table, size_t rows, size_t width) {
    if (!table) return nullptr;
    if (table->shape(0) != rows || table->shape(1) != width) throw std::invalid_argument("the drafts' arrays differ in shape");
    return table->data();
}

nb::tuple trim(Policy& policy, const Ints& widths, size_t width, const MaybeTable<int32_t>& parents,
               const MaybeTable<float>& said, const MaybeTable<uint8_t>& source, const std::vector<int>& sources,
               const std::vector<bool>& sampled) {
    const size_t rows = widths.shape(0);
    if (rows != policy.planned() || sampled.size() != rows || sources.empty())
        throw std::invalid_argument("trim is for the rows of the last plan");
    for (size_t i = 0; i < rows; ++i)
        if (widths.data()[i] < 0 || static_cast<size_t>(widths.data()[i]) > width) throw std::invalid_argument("widths are out of range");
    const Policy::Proposal drafts{widths.data(), pointer(parents, rows, width), pointer(said, rows, width),
                                  pointer(source, rows, width), width, &sources, &sampled};
    for (size_t i = 0; i < rows; ++i)
        for (size_t n = 0; n < static_cast<size_t>(widths.data()[i]); ++n) {
            if (drafts.parents && (drafts.parents[i * width + n] < -1 || drafts.parents[i * width + n] >= static_cast<int>(n)))
                throw std::invalid_argument("a parent must come before its child");
            if (drafts.source && drafts.source[i * width + n] >= sources.size()) throw std::invalid_argument("a source has no name");
        }
    const Policy::Choice choice = policy.trim(drafts);
    return nb::make_tuple(choice.kept, choice.expected, choice.chosen);
}

}  // namespace

void bind_drafting(nb::module_& m) {
    m.def(
        "newest_match",
        [](const Ints& tokens, int least, int most) -> nb::object {
            const Match found = newest_match(tokens.data(), tokens.shape(0), least, most);
            return found.length ? nb::object(nb::make_tuple(found.next, found.length)) : nb::none();
        },
        "tokens"_a, "least"_a, "most"_a);
    m.def(
        "merge",
        [](const std::vector<TreeLists>& proposals, int budget) {
            std::vector<SourcedTree> trees;
            for (const auto& [tokens, parents, gains, sources] : proposals) {
                if (parents.size() != tokens.size() || gains.size() != tokens.size() || sources.size() != tokens.size())
                    throw std::invalid_argument("a tree's lists differ in length");
                trees.push_back({tokens, parents, gains, sources});
            }
            SourcedTree merged = merge(trees, budget);
            return TreeLists(std::move(merged.tokens), std::move(merged.parents), std::move(merged.gains), std::move(merged.sources));
        },
        "proposals"_a, "budget"_a);
    nb::class_<SuffixIndex>(m, "SuffixIndex")
        .def("__init__",
             [](SuffixIndex* self, int64_t capacity, int most, int nearest, int few, std::vector<double> weights, double doubt) {
                 new (self) SuffixIndex(capacity, most, {nearest, few, {std::move(weights), doubt}});
             },
             "capacity"_a, "most"_a, "nearest"_a, "few"_a, "weights"_a, "doubt"_a)
        .def("__len__", [](const SuffixIndex& x) { return x.tokens().size(); })
        .def("append", [](SuffixIndex& x, const Ints& tokens) { x.append(tokens.data(), tokens.shape(0)); }, "tokens"_a)
        .def("shrink", &SuffixIndex::shrink, "n"_a)
        .def("tokens", [](const SuffixIndex& x) { return numpy(std::vector<int32_t>(x.tokens()), {x.tokens().size()}); })
        .def("places",
             [](const SuffixIndex& x, const Ints& context) {
                 std::vector<SuffixIndex::Place> found;
                 x.places(context.data(), context.shape(0), found);
                 nb::list listed;
                 for (const auto& place : found) listed.append(nb::make_tuple(place.at, place.length));
                 return listed;
             },
             "context"_a)
        .def("propose",
             [](const SuffixIndex& x, const Ints& context, int budget, const std::vector<const SuffixIndex*>& others, bool wide) {
                 return tuple_of(x.propose(context.data(), context.shape(0), budget, others, wide));
             },
             "context"_a, "budget"_a, "others"_a, "wide"_a);
    nb::class_<HeldDatastore>(m, "Datastore")
        .def("__init__",
             [](HeldDatastore* self, std::vector<SegmentArrays> segments, std::vector<double> weights, double doubt) {
                 new (self) HeldDatastore(std::move(segments), {std::move(weights), doubt});
             },
             "segments"_a, "weights"_a, "doubt"_a)
        .def("propose",
             [](const HeldDatastore& x, const Ints& context, int places, int least, int budget) {
                 return tuple_of(x.store.propose(context.data(), context.shape(0), places, least, budget));
             },
             "context"_a, "places"_a, "least"_a, "budget"_a);
    nb::class_<Policy>(m, "Policy")
        .def("__init__",
             [](Policy* self, const nb::dict& rules, std::vector<double> table, double last_width, double last_seconds,
                double slope, double row, double position, double position_width) {
                 if (table.empty()) throw std::invalid_argument("the cost table is empty");
                 new (self) Policy(rules_of(rules), {std::move(table), last_width, last_seconds, slope, row, position, position_width});
             },
             "rules"_a, "table"_a, "last_width"_a, "last_seconds"_a, "slope"_a, "row"_a, "position"_a, "position_width"_a)
        .def("plan",
             [](Policy& x, const std::vector<std::tuple<int, int, bool>>& rows, std::vector<int> most,
                std::vector<int64_t> contexts, int64_t prefill) {
                 if (most.size() != rows.size() || contexts.size() != rows.size())
                     throw std::invalid_argument("rows, most and contexts differ in length");
                 std::vector<Policy::View> views;
                 for (const auto& [row, kind, adaptive] : rows) views.push_back({row, kind, adaptive});
                 return x.plan(std::move(views), std::move(most), std::move(contexts), prefill);
             },
             "rows"_a, "most"_a, "contexts"_a, "prefill"_a)
        .def("trim", &trim, "widths"_a, "width"_a, "parents"_a.none(), "said"_a.none(), "source"_a.none(), "sources"_a, "sampled"_a)
        .def("learn",
             [](Policy& x, const std::vector<int>& accepted, const Table<int32_t>& path, double total, double draft,
                double target, double rest) {
                 if (accepted.size() != x.planned() || path.shape(0) != accepted.size())
                     throw std::invalid_argument("learn is for the rows of the last plan");
                 x.learn(accepted, path.data(), path.shape(1), {total, draft, target, rest});
             },
             "accepted"_a, "path"_a, "total"_a, "draft"_a, "target"_a, "rest"_a)
        .def("waited", &Policy::waited, "seconds"_a)
        .def("release", &Policy::release, "row"_a)
        .def("__len__", &Policy::rows);
}

}  // namespace outpace
