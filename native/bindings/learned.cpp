// What Python sees of learned drafters' networks, and of what these have read of rows.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/chooser.h"
#include "drafting/learned.h"
#include "weights/pack.h"

namespace outpace {
namespace {

using States3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;  // hidden states [n, layers, hidden]
using Noise = std::optional<Named>;  // of the next output token, as models/native/output.py describes it; None: greedy

Sampling sampling_of(const Noise& noise) { return noise ? outpace::sampling_of(*noise) : Sampling(); }

void fits(DraftNetwork& network, const States3& states) {
    const int layers = network.layers_read(), hidden = network.model().hidden();
    if (static_cast<int>(states.shape(1)) != layers || static_cast<int>(states.shape(2)) != hidden)
        throw std::invalid_argument("hidden states are [n, " + std::to_string(states.shape(1)) + ", " + std::to_string(states.shape(2)) +
                                    "], but must be [n, " + std::to_string(layers) + ", " + std::to_string(hidden) + "]");
}
void fits(DraftNetwork& network, const States3& states, const Ints& beside, const char* what) {
    fits(network, states);
    if (beside.shape(0) != states.shape(0))
        throw std::invalid_argument(std::to_string(beside.shape(0)) + " " + what + " and the hidden states of " +
                                    std::to_string(states.shape(0)) + " differ in length");
}

Matrix gathered(Arena& arena, const Matrix& m, const Ints& ids) {
    const std::vector<int32_t> rows = copied(ids);
    if (rows.empty()) throw std::invalid_argument("no rows to gather");
    for (const int32_t id : rows)
        if (id < 0 || id >= m.rows)
            throw std::invalid_argument("row " + std::to_string(id) + " is not one of the matrix's " + std::to_string(m.rows));
    return without_gil([&] { return gather(arena, m, rows.data(), static_cast<int>(rows.size())); });
}

// -- entries ----------------------------------------------------------------------------------------------------------

Entries::Row& row_of(Entries& entries, int64_t row) {
    Entries::Row* found = entries.find(row);
    if (!found) throw nb::key_error(std::to_string(row).c_str());
    return *found;
}

// How many of its unread entries are asked for.
Entries::Row& unread_row(Entries& entries, int64_t row, int n) {
    Entries::Row& found = row_of(entries, row);
    if (n < 0 || n > found.waiting())
        throw std::invalid_argument(std::to_string(n) + " entries, where " + std::to_string(found.waiting()) + " are unread");
    return found;
}

void append(Entries& entries, int64_t row, int first, const I32& tokens, const std::optional<States3>& states) {
    const IntCopy ids(tokens.ptr());
    const size_t wide = states ? states->shape(1) * states->shape(2) : 0;
    if (wide != entries.wide()) throw std::invalid_argument("hidden states are of other layers than the network reads");
    if (states && static_cast<int>(states->shape(0)) != ids.size())
        throw std::invalid_argument("tokens and hidden states differ in length");
    Entries::Row& to = entries.made(row);
    if (first < to.end()) throw std::invalid_argument("entry " + std::to_string(first) + " is known already");
    for (int i = 0; i < ids.size(); ++i) {
        float* at = entries.append(to, first + i, ids.data()[i]);
        if (wide) std::memcpy(at, states->data() + static_cast<size_t>(i) * wide, wide * sizeof(float));
    }
}

void bind_entries(nb::module_& m) {
    nb::class_<Entries>(m, "Entries",
        "What a network has read of rows, and what it has still to read; see native/drafting/learned.h. Entry i of a row has the target's "
        "hidden states of position i and the token after it. Raises ValueError, KeyError.")
        .def(nb::init<size_t>(), "wide"_a, "wide: numbers of an entry's hidden states; 0: they lie elsewhere.")
        .def("__contains__", [](Entries& x, int64_t row) { return x.find(row) != nullptr; }, "row"_a)
        .def("rows",
            [](Entries& x) {
        std::vector<int64_t> found;
        for (const auto& [row, known] : x.rows()) found.push_back(row);
        return found;
    })
        .def("append", &append, "row"_a, "first"_a, "tokens"_a, "states"_a.none(),
            "Entries `first` .. behind those that are known: tokens int32 [n] and hidden states [n, T, H], in the network's order.")
        .def("end", [](Entries& x, int64_t row) { return row_of(x, row).end(); }, "row"_a, "The entry after all that are known.")
        .def("read", [](Entries& x, int64_t row) { return row_of(x, row).read; }, "row"_a, "How many the network has.")
        .def("waiting", [](Entries& x, int64_t row) { return row_of(x, row).waiting(); }, "row"_a, "How many it has still to read.")
        .def("kept", [](Entries& x, int64_t row) { return row_of(x, row).kept(); }, "row"_a, "Of how many last ones states are kept.")
        .def("unread",
            [](Entries& x, int64_t row, int n) -> TupleOf<I32, I32> {
        const Entries::Row& from = unread_row(x, row, n);
        const size_t count = static_cast<size_t>(n);
        return nb::make_tuple(numpy(std::vector<int32_t>(from.unread_tokens(), from.unread_tokens() + n), {count}),
            numpy(std::vector<int32_t>(from.unread_at(), from.unread_at() + n), {count}));
    }, "row"_a, "n"_a, "Tokens and numbers int32 [n] of the first n unread entries, which stay unread.")
        .def("states",
            [](Entries& x, int64_t row, int n, int layers) -> F32 {
        const Entries::Row& from = unread_row(x, row, n);
        const size_t count = static_cast<size_t>(n), wide = x.wide(), depth = static_cast<size_t>(layers);
        if (layers < 1 || wide % depth) throw std::invalid_argument("an entry has no " + std::to_string(layers) + " layers");
        const float* values = x.unread_states(from);
        return numpy(std::vector<float>(values, values + count * wide), {count, depth, wide / depth});
    }, "row"_a, "n"_a, "layers"_a, "Hidden states float32 [n, layers, H] of the same.")
        .def("has_read", [](Entries& x, int64_t row, int n) { x.has_read(unread_row(x, row, n), n); }, "row"_a, "n"_a,
            "The network has the first n unread ones now.")
        .def("unread_last", [](Entries& x, int64_t row) { return x.unread_last(row_of(x, row)); }, "row"_a,
            "Make the last entry that the network has unread again, where nothing else is; whether that could be done.")
        .def("fork",
            [](Entries& x, int64_t src, int64_t dst, int before) {
        row_of(x, src);
        x.fork(src, dst, before);
    }, "src"_a, "dst"_a, "before"_a, "`dst` becomes what `src` has of the entries before `before`.")
        .def("retire",
            [](Entries& x, int64_t row) {
        if (Entries::Row* known = x.find(row)) x.retire(*known);
    }, "row"_a, "The states of the last entry that was read need not be kept.")
        .def("release", &Entries::release, "row"_a);
    nb::class_<LearnedRows, NativeDrafter>(
        m, "LearnedRows", "What drafters/learned/drafter.py does with its rows, in native steps; see native/drafting/learned.h.")
        .def_prop_ro("entries", &LearnedRows::entries, nb::rv_policy::reference_internal);
    nb::class_<DraftNetwork>(m, "DraftNetwork", "A network with keys and values of rows; see native/model/draft_network.h.")
        .def("row", &DraftNetwork::row, "of"_a, "The model's row of a row of the target; -1: it is not there.")
        // these two take the lock and keep the GIL: who has the lock does not wait for it
        .def("take", &DraftNetwork::take, "of"_a, "Make it where it is not there; whether that was so.")
        .def("drop", &DraftNetwork::drop, "of"_a)
        .def_prop_ro("rows", &DraftNetwork::rows, "The model's row of each row of the target.");
}

// -- EAGLE ------------------------------------------------------------------------------------------------------------

void make_eagle(Eagle* self, std::shared_ptr<Model> model, const std::optional<Matrix>& fuse, const std::vector<Floats>& norms,
    const Ints& tokens, bool norm_output, const std::optional<std::pair<int32_t, Floats>>& mask) {
    std::optional<Eagle::Mask> stands;
    if (mask) stands.emplace(Eagle::Mask{mask->first, values_of(mask->second)});
    new (self) Eagle(std::move(model), fuse.value_or(Matrix{}), values_of(norms), copied(tokens), norm_output, stands);
}

// (the target's row, tokens [n], hidden states [n, layers, hidden], nodes, levels, branch, noise, floor): see Eagle::Ask.
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

void bind_eagle(nb::module_& m) {
    nb::class_<Eagle, DraftNetwork>(
        m, "Eagle", "An EAGLE-3 drafter's network; see native/model/eagle.h. Raises ValueError, IndexError, MemoryLimit, NotFinite.")
        .def("__init__", &make_eagle, "model"_a, "fuse"_a.none(), "norms"_a, "tokens"_a, "norm_output"_a, "mask"_a.none(),
            "model: its first layer has an `embed_norm`. fuse: None where it reads one layer's states as they are. tokens int32 [D]: the "
            "target's ids, ascending. mask: P-EAGLE's token and states, by which all depths come from one forward.")
        .def_prop_ro("bytes", &Eagle::bytes, "Of its weights, the embedding aside.")
        .def("draft", &draft, "asks"_a,
            "Append entries to the target's rows and draft after each one's last: (row, tokens [n], hidden states [n, T, H], nodes (0: "
            "none), levels, branch, a chooser's description, floor). Tokens, parents and path probabilities of each ask's nodes, and the "
            "draft's levels.")
        .def("fuse", &fuse, "states"_a, "Features [n, H] of hidden states [n, T, H].");
    nb::class_<EagleRows, LearnedRows>(m, "EagleRows", "Levels: -1, as many as are asked for. Raises ValueError.")
        .def("__init__",
            [](EagleRows* self, Eagle& eagle, std::vector<int> layers, int branch, int most_levels, int fixed_levels, int deepest,
                int catch_up, int max_length) {
        if (layers.empty() || branch < 1 || branch > kMostBranch || most_levels > kMostLevels || catch_up < 1)
            throw std::invalid_argument("rows of an EAGLE drafter have layers, branches and a bound of entries that wait");
        new (self) EagleRows(eagle, std::move(layers), {branch, most_levels, fixed_levels, deepest, catch_up, max_length});
    },
            "eagle"_a, "layers"_a, "branch"_a, "most_levels"_a, "fixed_levels"_a, "deepest"_a, "catch_up"_a, "max_length"_a,
            nb::keep_alive<1, 2>());
}

// -- block-parallel ---------------------------------------------------------------------------------------------------

void make_parallel(Parallel* self, std::shared_ptr<Model> model, const Matrix& fuse, const Floats& norm, const Ints& tokens, int block,
    int mask, bool from_anchor, const std::optional<std::pair<Matrix, Matrix>>& markov, const std::optional<std::pair<Matrix, Floats>>& mix,
    const std::optional<std::pair<Floats, float>>& confidence, int candidates) {
    std::optional<Parallel::Markov> chain;
    if (markov) chain.emplace(Parallel::Markov{markov->first, markov->second, {}, {}, candidates});
    if (markov && mix) chain->mix = mix->first, chain->mix_bias = values_of(mix->second);
    std::optional<Parallel::Confidence> sure;
    if (confidence) sure.emplace(Parallel::Confidence{values_of(confidence->first), confidence->second});
    new (self)
        Parallel(std::move(model), fuse, values_of(norm), copied(tokens), {block, mask, from_anchor}, std::move(chain), std::move(sure));
}

void read_contexts(Parallel& network, const std::vector<std::tuple<int64_t, States3, Ints>>& described) {
    DraftNetwork::Taken taken(network);
    std::vector<Parallel::Context> contexts;
    for (const auto& [row, states, positions] : described) {
        fits(network, states, positions, "positions");
        contexts.push_back({taken.row(row), states.data(), copied(positions)});
    }
    without_gil([&] { network.read(contexts); });
    taken.keep();
}

// (the target's row, anchor, position, slots, noise) each: see Parallel::Ask.
using BlockAsks = std::vector<std::tuple<int, int32_t, int, int, Noise>>;

std::vector<Parallel::Ask> block_asks(const Parallel& network, const BlockAsks& described) {
    std::vector<Parallel::Ask> asks;
    for (const auto& [row, anchor, position, slots, noise] : described)
        asks.push_back({network.row(row), anchor, position, slots, sampling_of(noise)});
    if (asks.empty()) throw std::invalid_argument("nothing is asked for");
    return asks;
}

// The same, and nodes and branch.
using BlockDraftAsks = std::vector<std::tuple<int, int32_t, int, int, Noise, int, int>>;

ListOf<TupleOf<std::vector<int>, std::vector<int>, std::vector<double>>> draft_blocks(Parallel& x, const BlockDraftAsks& described) {
    std::vector<Parallel::Ask> asks;
    for (const auto& [row, anchor, position, slots, noise, nodes, branch] : described)
        asks.push_back({x.row(row), anchor, position, slots, sampling_of(noise), nodes, branch});
    if (asks.empty()) throw std::invalid_argument("nothing is asked for");
    nb::list found;
    for (const Draft& draft : without_gil([&] { return x.draft(asks); }))
        found.append(nb::make_tuple(draft.tokens, draft.parents, draft.gains));
    return found;
}

// Two lists of rows as arrays [n, a] and [n, b].
TupleOf<F32, F32> matrices(std::pair<std::vector<float>, std::vector<float>>&& found, int a, int b) {
    const size_t wide = static_cast<size_t>(a), wider = static_cast<size_t>(b), n = wide ? found.first.size() / wide : 0;
    return nb::make_tuple(numpy(std::move(found.first), {n, wide}), numpy(std::move(found.second), {n, wider}));
}

TupleOf<F32, F32> block_states(Parallel& x, const BlockAsks& described) {
    const std::vector<Parallel::Ask> asks = block_asks(x, described);
    return matrices(without_gil([&] { return x.states(asks); }), x.model().hidden(), x.model().outputs());
}

TupleOf<F32, F32, F32> markov_bias(Parallel& x, const Ints& tokens, const Matrixf& states, const Matrixf& left) {
    const std::vector<int32_t> ids = copied(tokens);
    const size_t n = ids.size(), wide = static_cast<size_t>(x.rank()), outputs = static_cast<size_t>(x.model().outputs());
    if (states.shape(0) != n || static_cast<int>(states.shape(1)) != x.model().hidden() || left.shape(0) != n || left.shape(1) != wide)
        throw std::invalid_argument("states [n, H] and what slots have left [n, rank] must go with the tokens");
    std::vector<float> leaves(left.data(), left.data() + n * wide), known;
    std::vector<float> found = without_gil([&] { return x.bias(ids, states.data(), leaves, known); });
    return nb::make_tuple(numpy(std::move(known), {n, wide}), numpy(std::move(found), {n, outputs}), numpy(std::move(leaves), {n, wide}));
}

void bind_parallel(nb::module_& m) {
    nb::class_<Parallel, DraftNetwork>(m, "Parallel",
        "A block-parallel drafter's network; see native/model/parallel.h. Raises ValueError, IndexError, MemoryLimit, NotFinite.")
        .def("__init__", &make_parallel, "model"_a, "fuse"_a, "norm"_a, "tokens"_a, "block"_a, "mask"_a, "from_anchor"_a, "markov"_a.none(),
            "mix"_a.none(), "confidence"_a.none(), "candidates"_a,
            "tokens int32 [D]: the target's ids, ascending. markov: [V, rank] and [D, rank]. mix: of a Markov head that reads more than "
            "a token, weights and bias. confidence: its head's weights, of a state or of that and the token before, and its bias. "
            "candidates: the likeliest tokens of a slot that it chooses among; 0: all.")
        .def_prop_ro("bytes", &Parallel::bytes, "Of its weights, the embedding and what is looked up of tokens aside.")
        .def("read", &read_contexts, "contexts"_a,
            "Append to the target's rows: (row, hidden states [n, T, H], positions [n] that ascend beyond the row's last).")
        .def("draft", &draft_blocks, "asks"_a,
            "(row, pending token, where it stands, slots, a chooser's description, nodes, branch: 1 is a chain). Tokens, parents and path "
            "probabilities of each ask's nodes.")
        .def("states", &block_states, "asks"_a,
            "Normed states [N, H] and logits [N, D] of all slots, ask after ask, without the Markov head's share.")
        .def("bias", &markov_bias, "tokens"_a, "states"_a, "left"_a,
            "Of tokens [n] before slots with normed states [n, H], where the slots before have left [n, rank]: what the Markov head knows "
            "of the tokens [n, rank], what it adds to the logits [n, D], and what these slots leave.")
        .def_prop_ro("rank", &Parallel::rank, "Of the Markov head; 0: there is none.");
    nb::class_<ParallelRows, LearnedRows>(m, "ParallelRows", "Raises ValueError.")
        .def(nb::init<Parallel&, std::vector<int>, int, int, int>(), "network"_a, "layers"_a, "branch"_a, "most_levels"_a, "max_length"_a,
            nb::keep_alive<1, 2>());
}

// -- Medusa -----------------------------------------------------------------------------------------------------------

void make_medusa(Medusa* self, std::shared_ptr<Model> target,
    const std::vector<std::vector<std::pair<Matrix, std::optional<Floats>>>>& blocks, std::vector<Matrix> rows, const Ints& tokens) {
    std::vector<std::vector<Medusa::Block>> heads;
    for (const auto& head : blocks) {
        heads.emplace_back();
        for (const auto& [weight, bias] : head) heads.back().push_back({weight, bias ? values_of(*bias) : std::vector<float>()});
    }
    new (self) Medusa(std::move(target), std::move(heads), std::move(rows), copied(tokens));
}

F32 medusa_logits(Medusa& network, const Matrixf& states) {
    if (static_cast<int>(states.shape(1)) != network.target().hidden())
        throw std::invalid_argument("states of another size than the target's");
    std::vector<const float*> each;
    for (size_t i = 0; i < states.shape(0); ++i) each.push_back(states.data() + i * states.shape(1));
    return numpy(without_gil([&] { return network.logits(each); }),
        {each.size(), static_cast<size_t>(network.heads()), static_cast<size_t>(network.outputs())});
}

void bind_medusa(nb::module_& m) {
    nb::class_<Medusa>(m, "Medusa", "Medusa's heads beside a target; see native/model/medusa.h. Raises ValueError, NotFinite.")
        .def("__init__", &make_medusa, "target"_a, "blocks"_a, "rows"_a, "tokens"_a,
            "blocks: weight and bias of each block, by head. rows: of each head, or one for all. tokens int32 [D]: the target's ids, "
            "ascending.")
        .def("logits", &medusa_logits, "states"_a, "[n, heads, D] of the target's last layer's states [n, H].");
    nb::class_<MedusaRows, LearnedRows>(m, "MedusaRows", "tree: parent, head and rank of each node. Raises ValueError, IndexError.")
        .def("__init__", [](MedusaRows* self, Medusa& network, int layer, const std::vector<std::tuple<int, int, int>>& tree) {
        std::vector<MedusaRows::Node> nodes;
        for (const auto& [parent, head, rank] : tree) nodes.push_back({parent, head, rank});
        new (self) MedusaRows(network, layer, std::move(nodes));
    }, "network"_a, "layer"_a, "tree"_a, nb::keep_alive<1, 2>());
}

}  // namespace

void bind_learned(nb::module_& m) {
    nb::exception<NotFinite>(m, "NotFinite", PyExc_ArithmeticError);
    m.def("gather", &gathered, "arena"_a, "matrix"_a, "ids"_a,
        "Rows `ids` of a matrix, with the same values, as a matrix. Raises ValueError.");
    bind_entries(m);
    bind_eagle(m);
    bind_parallel(m);
    bind_medusa(m);
}

}  // namespace outpace
