// What Python sees of block-parallel networks and Medusa's heads, and of their rows.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <mutex>

#include "bindings/learned.h"
#include "drafting/learned.h"

namespace outpace {
namespace {

void make_parallel(Parallel* self, std::shared_ptr<Model> model, const Matrix& fuse, const Floats& norm, const Ints& tokens, int block,
    int mask, bool from_anchor, const std::optional<std::pair<Matrix, Matrix>>& markov,
    const std::optional<std::pair<Floats, float>>& confidence) {
    std::optional<Parallel::Markov> chain;
    if (markov) chain.emplace(Parallel::Markov{markov->first, markov->second});
    std::optional<Parallel::Confidence> sure;
    if (confidence) sure.emplace(Parallel::Confidence{values_of(confidence->first), confidence->second});
    new (self)
        Parallel(std::move(model), fuse, values_of(norm), copied(tokens), {block, mask, from_anchor}, std::move(chain), std::move(sure));
}

void read_contexts(ParallelRows& rows, const std::vector<std::tuple<int64_t, States3, Ints>>& described) {
    std::vector<ParallelRows::Read> reads;
    for (const auto& [row, states, positions] : described) {
        fits(rows.network(), states, positions, "positions");
        reads.push_back({row, copied(positions), {states.data(), states.data() + states.size()}});
    }
    without_gil([&] { rows.read(reads); });
}

// (the target's row, anchor, position, slots, noise) each: see learned.h.
using BlockAsks = std::vector<std::tuple<int, int32_t, int, int, Noise>>;

std::vector<Parallel::Ask> block_asks(const Parallel& network, const BlockAsks& described) {
    std::vector<Parallel::Ask> asks;
    for (const auto& [row, anchor, position, slots, noise] : described)
        asks.push_back({network.row(row), anchor, position, slots, sampling_of(noise)});
    if (asks.empty()) throw std::invalid_argument("nothing is asked for");
    return asks;
}

ListOf<TupleOf<ListOf<int>, ListOf<double>>> draft_blocks(Parallel& x, const BlockAsks& described) {
    const std::vector<Parallel::Ask> asks = block_asks(x, described);
    nb::list found;
    for (const auto& slots : without_gil([&] { return x.draft(asks); })) {
        nb::list places, chances;
        for (const RankedToken& slot : slots) places.append(slot.place), chances.append(slot.share);
        found.append(nb::make_tuple(places, chances));
    }
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

TupleOf<F32, F32> markov_bias(Parallel& x, const Ints& tokens) {
    const std::vector<int32_t> ids = copied(tokens);
    return matrices(without_gil([&] { return x.bias(ids); }), x.rank(), x.model().outputs());
}

void make_medusa(Medusa* self, std::shared_ptr<Model> target,
    const std::vector<std::vector<std::pair<Matrix, std::optional<Floats>>>>& blocks, std::vector<Matrix> rows, const Ints& tokens) {
    std::vector<std::vector<Medusa::Block>> heads;
    for (const auto& head : blocks) {
        heads.emplace_back();
        for (const auto& [weight, bias] : head) heads.back().push_back({weight, bias ? values_of(*bias) : std::vector<float>()});
    }
    new (self) Medusa(std::move(target), std::move(heads), std::move(rows), copied(tokens));
}

F32 medusa_logits(MedusaRows& rows, const std::vector<int64_t>& asked) {
    Medusa& network = rows.network();
    std::vector<const float*> states;
    for (const int64_t row : asked) states.push_back(rows.states().at(row).values.data());
    return numpy(without_gil([&] { return network.logits(states); }),
        {asked.size(), static_cast<size_t>(network.heads()), static_cast<size_t>(network.outputs())});
}

}  // namespace

void bind_parallel(nb::module_& m) {
    nb::class_<Parallel>(m, "Parallel",
        "A block-parallel drafter's network; see native/model/parallel.h. Raises ValueError, IndexError, MemoryLimit, NotFinite.")
        .def("__init__", &make_parallel, "model"_a, "fuse"_a, "norm"_a, "tokens"_a, "block"_a, "mask"_a, "from_anchor"_a, "markov"_a.none(),
            "confidence"_a.none(),
            "tokens int32 [D]: the target's ids, ascending. markov: [V, rank] and [D, rank]. confidence: its head's weights, of a state or "
            "of "
            "that and the token before, and its bias.")
        .def_prop_ro("bytes", &Parallel::bytes, "Of its weights, the embedding and what is looked up of tokens aside.")
        .def_prop_ro("rows", &Parallel::rows, "The model's row of each row of the target.")
        .def("draft", &draft_blocks, "asks"_a,
            "(row, pending token, where it stands, slots, None or temperature, seed, sample and output index). Of each ask's slots their "
            "places in the draft vocabulary and chances.")
        .def("states", &block_states, "asks"_a,
            "Normed states [N, H] and logits [N, D] of all slots, ask after ask, without the Markov head's share.")
        .def("bias", &markov_bias, "tokens"_a, "What the Markov head knows of tokens [n, rank], and what that adds to logits [n, D].");
    nb::class_<ParallelRows, NativeDrafter>(m, "ParallelRows",
        "What a Parallel has read of rows of the target, and how native steps draft from it. Raises ValueError, MemoryLimit.")
        .def(nb::init<Parallel&, std::vector<int>, int>(), "network"_a, "layers"_a, "max_length"_a, nb::keep_alive<1, 2>())
        .def("end", &ParallelRows::end, "row"_a)
        .def("read", &read_contexts, "contexts"_a, "Append to rows: (row, hidden states [n, T, H], positions [n]).")
        .def("fork", &ParallelRows::fork, "src"_a, "dst"_a, "end"_a)
        .def("release", &ParallelRows::release, "row"_a)  // these take the lock and keep the GIL, as Eagle's do
        .def_prop_ro("positions", &ParallelRows::positions);
    nb::class_<Medusa>(m, "Medusa", "Medusa's heads beside a target; see native/model/medusa.h. Raises ValueError, NotFinite.")
        .def("__init__", &make_medusa, "target"_a, "blocks"_a, "rows"_a, "tokens"_a,
            "blocks: weight and bias of each block, by head. rows: of each head, or one for all. tokens int32 [D]: the target's ids, "
            "ascending.");
    nb::class_<MedusaRows, NativeDrafter>(m, "MedusaRows",
        "The target's last state before each row's pending token, and how native steps draft from it. tree: parent, head and rank of each "
        "node. Raises ValueError, IndexError.")
        .def("__init__",
            [](MedusaRows* self, Medusa& network, int layer, const std::vector<std::tuple<int, int, int>>& tree) {
        std::vector<MedusaRows::Node> nodes;
        for (const auto& [parent, head, rank] : tree) nodes.push_back({parent, head, rank});
        new (self) MedusaRows(network, layer, std::move(nodes));
    }, "network"_a, "layer"_a, "tree"_a, nb::keep_alive<1, 2>())
        .def("keep",
            [](MedusaRows& x, int64_t row, int position, const Floats& state) {
        if (static_cast<int>(state.size()) != x.network().target().hidden())
            throw std::invalid_argument("a state of another size than the target's");
        x.states()[row] = {position, values_of(state)};
    }, "row"_a, "position"_a, "state"_a)
        .def("position", [](MedusaRows& x, int64_t row) { return x.states().count(row) ? x.states()[row].position : -1; }, "row"_a)
        .def("rows", [](MedusaRows& x) { return keys_of(x.states()); })
        .def("logits", &medusa_logits, "rows"_a, "[n, heads, D].")
        .def("fork", [](MedusaRows& x, int64_t src, int64_t dst) { x.states()[dst] = x.states().at(src); }, "src"_a, "dst"_a)
        .def("release", [](MedusaRows& x, int64_t row) { x.states().erase(row); }, "row"_a);
}

}  // namespace outpace
