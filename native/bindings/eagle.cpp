// What Python sees of a learned drafter's network.
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "model/eagle.h"
#include "weights/pack.h"

namespace outpace {
namespace {

using States = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

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

void fits(const Eagle& eagle, const States& taps, int hidden) {
    if (static_cast<int>(taps.shape(1)) != eagle.taps() || static_cast<int>(taps.shape(2)) != hidden)
        throw std::invalid_argument("taps are [n, " + std::to_string(taps.shape(1)) + ", " + std::to_string(taps.shape(2)) + "], but must be [n, " +
                                    std::to_string(eagle.taps()) + ", " + std::to_string(hidden) + "]");
}

// (row, tokens, taps, nodes, levels, branch, None or (temperature, seed, sample, index))
Eagle::Ask ask_of(Eagle& eagle, const nb::tuple& d, std::vector<States>& kept) {
    if (d.size() != 7) throw std::invalid_argument("an ask has 7 parts, not " + std::to_string(d.size()));
    const States taps = nb::cast<States>(d[2]);
    kept.push_back(taps);  // whatever another thread does to the list
    fits(eagle, taps, eagle.model().hidden());
    Eagle::Ask ask{nb::cast<int>(d[0]), copied(nb::cast<Ints>(d[1])), taps.data(), nb::cast<int>(d[3]), nb::cast<int>(d[4]), nb::cast<int>(d[5]),
                   Sampling{0.0, 0, 1.0, 0.0, 0, 0, 0, 0}};
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
    std::vector<States> kept;
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

nb::object fuse(Eagle& eagle, const States& taps) {
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

}  // namespace

void bind_eagle(nb::module_& m) {
    nb::exception<NotFinite>(m, "NotFinite", PyExc_ArithmeticError);
    m.def("gather", &gathered, "arena"_a, "matrix"_a, "ids"_a);
    nb::class_<Eagle>(m, "Eagle")
        .def("__init__", &make_eagle, "model"_a, "fuse"_a, "norms"_a, "tokens"_a, "norm_output"_a)
        .def_prop_ro("bytes", &Eagle::bytes)
        .def("draft", &draft, "asks"_a)
        .def("fuse", &fuse, "taps"_a)
        .def("take_timings", &timings);
}

}  // namespace outpace
