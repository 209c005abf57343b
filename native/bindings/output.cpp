// What Python sees of a forward's result: choices, verdicts, logits, hidden states; and the parts that drafters share.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/chooser.h"
#include "model/ranks.h"
#include "model/walk.h"
#include "runtime/cpu.h"
#include "sampling/shortlist.h"

namespace outpace {
namespace {

I32 best_of(const Result& result, const I32& at) {
    const IntView nodes(at.ptr());
    const IntArray tokens({nodes.size()});
    for (int i = 0; i < nodes.size(); ++i) tokens.data[i] = greedy(result.best[static_cast<size_t>(result.find(nodes.data()[i]))]);
    return tokens.object;
}

// A row's chooser, as models/native/output.py describes it.
Chooser chooser_of(const Named& described) { return {sampling_of(described), edits_of(nb::cast<nb::list>(described["rules"]))}; }

int choose_after(const Result& result, int32_t at, const Named& described) {
    const Chooser chooser = chooser_of(described);
    const int i = result.find(at);
    nb::gil_scoped_release release;
    Workspace workspace;
    return chooser.choose(result, i, workspace);
}

// exact.verify.walk for the rows that are described; the arrays of Verdicts. `rows`: None, a row that is left out; {},
// greedy without rules; else what `chooser_of` takes.
TupleOf<I32, I32, I32> verify(const Result& result, const I32& tokens, const I32& widths, const I32& parents, const I32& starts,
    const ListOf<std::optional<Named>>& rows) {
    const IntCopy token(tokens.ptr(), 2), width(widths.ptr()), start(starts.ptr());
    std::optional<IntCopy> parent;
    if (!parents.is_none()) parent.emplace(parents.ptr(), 2);
    const int b = token.size(), w = token.width();
    if (width.size() != b || start.size() != b || static_cast<int>(rows.size()) != b ||
        (parent && (parent->size() != b || parent->width() != w)))
        throw std::invalid_argument("drafts, starts and choosers differ in length");
    std::vector<std::optional<Chooser>> choosers(static_cast<size_t>(b));
    std::vector<char> asked(static_cast<size_t>(b));
    bool plain = true;  // every choice is known already
    for (int i = 0; i < b; ++i) {
        if (width.data()[i] < 0 || width.data()[i] > w) throw std::invalid_argument("a draft's width is out of range");
        const nb::handle row = PyList_GetItem(rows.ptr(), i);
        if (row.is_none()) continue;
        asked[static_cast<size_t>(i)] = 1;
        const nb::dict described = nb::cast<nb::dict>(row);
        if (described.size() == 0) continue;
        choosers[static_cast<size_t>(i)].emplace(chooser_of(described));
        plain = false;
    }
    const IntArray gained({b, w + 1}), accepted({b}), path({b, w});
    std::fill(gained.data, gained.data + static_cast<size_t>(b) * static_cast<size_t>(w + 1), 0);
    std::fill(path.data, path.data + static_cast<size_t>(b) * static_cast<size_t>(w), 0);
    const auto sampled = std::count_if(choosers.begin(), choosers.end(), [](const auto& its) { return its.has_value(); });
    {
        std::optional<nb::gil_scoped_release> release;
        if (!plain) release.emplace();
        decide_all(result.runtime.get(), b, static_cast<int>(sampled), [&](int i, Workspace& workspace) {
            const size_t at = static_cast<size_t>(i) * static_cast<size_t>(w);
            std::optional<Chooser>& chooser = choosers[static_cast<size_t>(i)];
            accepted.data[i] = !asked[static_cast<size_t>(i)]
                                   ? -1
                                   : walk(result, start.data()[i], token.data() + at, parent ? parent->data() + at : nullptr,
                                         width.data()[i], chooser ? &*chooser : nullptr, gained.data + at + i, path.data + at, workspace);
        });
    }
    return nb::make_tuple(gained.object, accepted.object, path.object);
}

// exact.sampling.token_logprob of `tokens` [n] and the `top` [n] likeliest, where the logits lie: a number and [(token, number)]
// for each packed token of `at` [n].
ListOf<TupleOf<double, ListOf<TupleOf<int, double>>>> logprobs_of(
    const Result& result, const I32& at, const I32& tokens, const std::vector<int>& top) {
    const IntCopy nodes(at.ptr()), token(tokens.ptr());
    const size_t n = static_cast<size_t>(nodes.size());
    if (static_cast<size_t>(token.size()) != n || top.size() != n) throw std::invalid_argument("at, tokens and top differ in length");
    struct Found {
        int place;
        double log_sum;
        std::vector<int32_t> best;
    };
    std::vector<Found> found(n);
    for (size_t i = 0; i < n; ++i) {
        if (token.data()[i] < 0 || token.data()[i] >= result.vocab || top[i] < 0)
            throw std::out_of_range("a token is not in the vocabulary, or top is below 0");
        found[i] = {result.find(nodes.data()[i]), 0.0, std::vector<int32_t>(static_cast<size_t>(std::min(top[i], result.vocab)))};
    }
    {
        nb::gil_scoped_release release;
        decide_all(result.runtime.get(), static_cast<int>(n), static_cast<int>(n), [&](int i, Workspace&) {
            const DenormalsAsZero mode;
            Found& its = found[static_cast<size_t>(i)];
            const float* logits = result.logits(its.place);
            its.log_sum = log_sum(logits, result.vocab, result.best[static_cast<size_t>(its.place)], *result.kernels);
            if (!its.best.empty()) likeliest(logits, result.vocab, static_cast<int>(its.best.size()), *result.kernels, its.best.data());
        });
    }
    nb::list each;
    for (size_t i = 0; i < n; ++i) {
        const auto of = [&](int32_t id) { return static_cast<double>(result.logits(found[i].place)[id]) - found[i].log_sum; };
        nb::list best;
        for (const int32_t id : found[i].best)
            if (id >= 0) best.append(nb::make_tuple(id, of(id)));
        each.append(nb::make_tuple(of(token.data()[i]), best));
    }
    return each;
}

F32 logits_of(const Result& result, const Ints& at) {
    const size_t vocab = static_cast<size_t>(result.vocab);
    std::vector<float> values(at.shape(0) * vocab);
    for (size_t i = 0; i < at.shape(0); ++i)
        std::memcpy(values.data() + i * vocab, result.logits(result.find(at.data()[i])), vocab * sizeof(float));
    return numpy(std::move(values), {at.shape(0), vocab});
}

I32 hidden_places(const Result& result, const I32& at) {
    const IntCopy nodes(at.ptr());
    if (result.hidden_count == 0)
        throw std::invalid_argument("this forward kept no hidden states: name layers in the batch's hidden_layers");
    const IntArray places({nodes.size()});
    for (int i = 0; i < nodes.size(); ++i) {
        const int32_t t = nodes.data()[i];
        if (t < 0 || t >= result.tokens) throw std::out_of_range("packed index " + std::to_string(t) + " is not in the batch");
        places.data[i] = result.hidden_place[static_cast<size_t>(t)];
        if (places.data[i] < 0)
            throw std::out_of_range("packed index " + std::to_string(t) +
                                    " is of a row whose hidden states were not kept: set its place in the batch's hidden_rows");
    }
    return places.object;
}

// They outlive the result.
F32 hidden_states(const Result& result) {
    auto* kept = new std::shared_ptr<float[]>(result.hidden_states);
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<float[]>*>(p); });
    const size_t shape[] = {
        static_cast<size_t>(result.hidden_tokens), static_cast<size_t>(result.hidden_count), static_cast<size_t>(result.hidden)};
    return nb::cast(nb::ndarray<nb::numpy, const float>(kept->get(), 3, shape, owner));
}

std::unique_ptr<Result> result_of(const Matrixf& logits, const Ints& wanted, const std::string& isa) {
    std::vector<int32_t> its = copied(wanted);
    if (logits.shape(0) != its.size() || logits.shape(1) == 0)
        throw std::invalid_argument("logits must be [" + std::to_string(its.size()) + ", vocabulary]");
    for (size_t i = 1; i < its.size(); ++i)
        if (its[i] <= its[i - 1]) throw std::invalid_argument("wanted must ascend");
    return Result::of(logits.data(), static_cast<int>(logits.shape(1)), std::move(its), kernels_for(isa));
}

std::vector<int32_t> within(const Ints& ids, int vocab) {
    std::vector<int32_t> its = copied(ids);
    for (const int32_t id : its)
        if (id < 0 || id >= vocab)
            throw std::invalid_argument("token " + std::to_string(id) + " is not in the vocabulary of " + std::to_string(vocab));
    return its;
}

void wide(const Matrixf& states, int hidden) {
    if (static_cast<int>(states.shape(1)) != hidden)
        throw std::invalid_argument(
            "hidden states are [n, " + std::to_string(states.shape(1)) + "], but must be [n, " + std::to_string(hidden) + "]");
}

F32 embed(const Model& model, const Ints& tokens) {
    const std::vector<int32_t> ids = within(tokens, model.vocab());
    const size_t n = ids.size(), hidden = static_cast<size_t>(model.hidden());
    std::vector<float> out(n * hidden);
    model.embed(ids.data(), static_cast<int>(n), out.data());
    return numpy(std::move(out), {n, hidden});
}

F32 final_norm(const Model& model, const Matrixf& states) {
    wide(states, model.hidden());
    std::vector<float> out(states.shape(0) * states.shape(1));
    model.final_norm(states.data(), static_cast<int>(states.shape(0)), out.data());
    return numpy(std::move(out), {states.shape(0), states.shape(1)});
}

F32 head(Model& model, const Matrixf& normed, const std::optional<Ints>& ids) {
    wide(normed, model.hidden());
    std::vector<int32_t> its;
    if (ids) its = within(*ids, model.outputs());
    const size_t n = normed.shape(0), count = ids ? its.size() : static_cast<size_t>(model.outputs());
    std::vector<float> out(n * count);
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(model.lock());
        model.head(normed.data(), static_cast<int>(n), ids ? its.data() : nullptr, static_cast<int>(count), out.data());
    }
    return numpy(std::move(out), {n, count});
}

}  // namespace

void bind_output(nb::module_& m) {
    nb::class_<Result>(
        m, "Result", "One forward's logits, best tokens and hidden states. Indices are packed ones. Raises IndexError for others.")
        .def_static("of", &result_of, "logits"_a, "wanted"_a, "isa"_a = "",
            "As if a forward had computed float32 logits [n, V] of packed indices `wanted`.")
        .def_ro("threads", &Result::threads)
        .def_ro("experts", &Result::experts, "Distinct experts that a mixture's tokens went to, on average over layers; 0: there is none.")
        .def("best", &best_of, "at"_a, "Argmax int32 [n]; -1: all are -inf; -2: NaN or infinity.")
        .def("choose", &choose_after, "at"_a, "chooser"_a,
            "A token; -1: none is allowed; -2: NaN or infinity; -3: too close to top-p's edge to decide here.")
        .def("verify", &verify, "tokens"_a, "widths"_a, "parents"_a.none(), "starts"_a, "rows"_a,
            "The arrays of Verdicts. rows: None is left out, {} is greedy without rules. Accepted -1: not decided.")
        .def("logits", &logits_of, "at"_a)
        .def("logprobs", &logprobs_of, "at"_a, "tokens"_a, "top"_a,
            "Of each of `tokens` [n], and of the `top` [n] likeliest: see exact.sampling.token_logprob.")
        .def("hidden_places", &hidden_places, "at"_a,
            "Where packed indices stand among the tokens of `hidden_states`. Raises IndexError, ValueError without.")
        .def("hidden_states", &hidden_states, "float32 [n, T, H] of all tokens whose rows keep them, not copied; not to be written to.");
    m.def("embed", &embed, "model"_a, "tokens"_a);
    m.def("final_norm", &final_norm, "model"_a, "states"_a);
    m.def("head", &head, "model"_a, "normed"_a, "ids"_a.none());
}

}  // namespace outpace
