// What Python sees of a block-parallel drafter's network.
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "model/parallel.h"

namespace outpace {
namespace {

using BlockTaps = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

std::vector<float> values_of(const Floats& values) { return {values.data(), values.data() + values.size()}; }

// markov: None or (before, after); sure: None or (weight, bias).
void make_parallel(Parallel* self, std::shared_ptr<Model> model, const Matrix& fuse, const Floats& norm, const Ints& tokens,
                   int block, int mask, bool from_anchor, const nb::object& markov, const nb::object& sure) {
    std::optional<Parallel::Markov> chain;
    if (!markov.is_none()) {
        const nb::tuple its = nb::cast<nb::tuple>(markov);
        chain.emplace(Parallel::Markov{nb::cast<Matrix>(its[0]), nb::cast<Matrix>(its[1])});
    }
    std::optional<Parallel::Sure> word;
    if (!sure.is_none()) {
        const nb::tuple its = nb::cast<nb::tuple>(sure);
        word.emplace(Parallel::Sure{values_of(nb::cast<Floats>(its[0])), nb::cast<float>(its[1])});
    }
    new (self) Parallel(std::move(model), fuse, values_of(norm), copied(tokens), {block, mask, from_anchor}, std::move(chain),
                        std::move(word));
}

// (row, taps [n, T, H], positions [n]) each.
void read_contexts(Parallel& x, const nb::list& described) {
    std::vector<BlockTaps> kept;  // whatever another thread does to the list
    std::vector<Parallel::Context> contexts;
    for (const nb::handle one : described) {
        const nb::tuple its = nb::cast<nb::tuple>(one);
        const BlockTaps taps = nb::cast<BlockTaps>(its[1]);
        kept.push_back(taps);
        if (static_cast<int>(taps.shape(1)) != x.taps() || static_cast<int>(taps.shape(2)) != x.model().hidden())
            throw std::invalid_argument("taps are [n, " + std::to_string(taps.shape(1)) + ", " + std::to_string(taps.shape(2)) +
                                        "], but must be [n, " + std::to_string(x.taps()) + ", " + std::to_string(x.model().hidden()) + "]");
        contexts.push_back({nb::cast<int>(its[0]), taps.data(), copied(nb::cast<Ints>(its[2]))});
        if (contexts.back().positions.size() != taps.shape(0))
            throw std::invalid_argument(std::to_string(contexts.back().positions.size()) + " positions and the taps of " +
                                        std::to_string(taps.shape(0)) + " differ in length");
    }
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(x.model().lock());
    x.read(contexts);
}

// (row, anchor, position, slots, None or (temperature, seed, sample, index)) each.
std::vector<Parallel::Ask> block_asks(const nb::list& described) {
    std::vector<Parallel::Ask> asks;
    for (const nb::handle one : described) {
        const nb::tuple its = nb::cast<nb::tuple>(one);
        asks.push_back({nb::cast<int>(its[0]), nb::cast<int32_t>(its[1]), nb::cast<int>(its[2]), nb::cast<int>(its[3]),
                        Sampling{}});
        Parallel::Ask& ask = asks.back();
        if (its[4].is_none()) continue;
        const nb::tuple noise = nb::cast<nb::tuple>(its[4]);
        ask.sampling.temperature = nb::cast<double>(noise[0]);
        ask.sampling.seed = nb::cast<uint64_t>(noise[1]);
        ask.sampling.sample = nb::cast<uint32_t>(noise[2]);
        ask.sampling.index = nb::cast<uint32_t>(noise[3]);
    }
    if (asks.empty()) throw std::invalid_argument("nothing is asked for");
    return asks;
}

// Places in the draft vocabulary [B, W] and each slot's chance [B, W], W the most slots that are asked for; 0 beyond a row's own.
nb::tuple draft_blocks(Parallel& x, const nb::list& described) {
    const std::vector<Parallel::Ask> asks = block_asks(described);
    std::vector<Parallel::Draft> drafts;
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(x.model().lock());
        drafts = x.draft(asks);
    }
    size_t w = 0;
    for (const Parallel::Draft& its : drafts) w = std::max(w, its.places.size());
    const auto b = static_cast<Py_ssize_t>(drafts.size()), width = static_cast<Py_ssize_t>(w);
    const IntArray places({b, width});
    const Array<float> chances(Names::get().float32, {b, width});
    for (size_t i = 0; i < drafts.size(); ++i)
        for (size_t n = 0; n < w; ++n) {
            const bool real = n < drafts[i].places.size();
            places.data[i * w + n] = real ? drafts[i].places[n] : 0;
            chances.data[i * w + n] = real ? drafts[i].chances[n] : 0.0f;
        }
    return nb::make_tuple(places.object, chances.object);
}

// Normed states [N, H] and logits [N, D] of all slots that are asked for, ask after ask.
nb::tuple block_states(Parallel& x, const nb::list& described) {
    const std::vector<Parallel::Ask> asks = block_asks(described);
    size_t n = 0;
    for (const Parallel::Ask& ask : asks) n += static_cast<size_t>(std::clamp(ask.slots, 0, x.slots()));
    const size_t hidden = static_cast<size_t>(x.model().hidden()), outputs = static_cast<size_t>(x.model().outputs());
    std::vector<float> normed(n * hidden), logits(n * outputs);
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(x.model().lock());
        x.states(asks, normed.data(), logits.data());
    }
    return nb::make_tuple(numpy(std::move(normed), {n, hidden}), numpy(std::move(logits), {n, outputs}));
}

// What is known of tokens [n, rank], and what that adds to logits [n, D].
nb::tuple markov_bias(Parallel& x, const Ints& tokens) {
    const std::vector<int32_t> its = copied(tokens);
    for (const int32_t token : its)
        if (token < 0 || token >= x.model().vocab()) throw std::invalid_argument("token " + std::to_string(token) + " is not in the vocabulary");
    const size_t n = its.size(), rank = static_cast<size_t>(x.rank()), outputs = static_cast<size_t>(x.model().outputs());
    std::vector<float> before(n * rank), after(n * outputs);
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(x.model().lock());
        x.bias(its, before.data(), after.data());
    }
    return nb::make_tuple(numpy(std::move(before), {n, rank}), numpy(std::move(after), {n, outputs}));
}

}  // namespace

void bind_parallel(nb::module_& m) {
    nb::class_<Parallel>(m, "Parallel")
        .def("__init__", &make_parallel, "model"_a, "fuse"_a, "norm"_a, "tokens"_a, "block"_a, "mask"_a, "from_anchor"_a,
             "markov"_a.none(), "sure"_a.none())
        .def_prop_ro("bytes", &Parallel::bytes)
        .def("read", &read_contexts, "contexts"_a)
        .def("draft", &draft_blocks, "asks"_a)
        .def("states", &block_states, "asks"_a)
        .def("bias", &markov_bias, "tokens"_a);
}

}  // namespace outpace
