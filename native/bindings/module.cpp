// What Python sees: outpace._native. Everything that comes from Python is checked here or in what it calls.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "bindings/bindings.h"
#include "sampling/choose.h"
#include "runtime/cpu.h"
#include "model/model.h"
#include "weights/pack.h"

namespace outpace {
namespace {

std::vector<float> floats(const nb::dict& d, const char* key) {
    if (!d.contains(key)) return {};
    const Floats array = nb::cast<Floats>(d[key]);
    return {array.data(), array.data() + array.shape(0)};
}

Target target_of(const std::string& name) {
    if (name == "keep") return Target::Keep;
    if (name == "bf16") return Target::B16;
    if (name == "f32") return Target::F32;
    if (name == "int8") return Target::Int8;
    if (name == "int4") return Target::Int4;
    throw std::invalid_argument("unknown weight format '" + name + "': use keep, bf16, f32, int8 or int4");
}

const char* name_of(Format format) {
    switch (format) {
        case Format::I4S: return "I4S";
        case Format::I4M: return "I4M";
        case Format::I8S: return "I8S";
        case Format::I8M: return "I8M";
        case Format::K4: return "K4";
        case Format::K5: return "K5";
        case Format::K6: return "K6";
        case Format::B16: return "B16";
        case Format::H16: return "H16";
        case Format::F32: return "F32";
    }
    return "?";
}

Matrix pack_bytes(Arena& arena, const Bytes& data, int source, int64_t rows, int64_t cols, int heads,
                  const std::string& target, int threads) {
    constexpr int64_t most = int64_t{1} << 30;
    if (rows <= 0 || cols <= 0 || rows > most || cols > most || rows * cols > (int64_t{1} << 40))
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " is not possible");
    const size_t expected = static_cast<size_t>(rows) * row_bytes(source, cols);
    if (data.size() != expected)
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " needs " +
                                    std::to_string(expected) + " bytes, got " + std::to_string(data.size()));
    const Target to = target_of(target);
    nb::gil_scoped_release release;
    return pack(arena, data.data(), source, static_cast<int>(rows), static_cast<int>(cols), heads, to, threads);
}

nb::object unpack(const Matrix& m) {
    std::vector<float> values(static_cast<size_t>(m.rows) * static_cast<size_t>(m.cols));
    for (int r = 0; r < m.rows; ++r) unpack_row(m, r, values.data() + static_cast<size_t>(r) * static_cast<size_t>(m.cols));
    return numpy(std::move(values), {static_cast<size_t>(m.rows), static_cast<size_t>(m.cols)});
}

// x [n, cols] -> y [n, rows] by one kernel table, for tests and benchmarks.
nb::object product(const Matrix& m, const Matrixf& x, const std::string& isa) {
    const Kernels& k = kernels_for(isa);
    const int n = static_cast<int>(x.shape(0));
    if (static_cast<int>(x.shape(1)) != m.cols) throw std::invalid_argument("x does not fit the matrix");
    std::vector<uint8_t> acts(static_cast<size_t>(m.groups) * n * act_bytes(m.acts()));
    std::vector<float> line(static_cast<size_t>(m.in_padded()));
    for (int t = 0; t < n; ++t) {
        std::memcpy(line.data(), x.data() + static_cast<size_t>(t) * m.cols, static_cast<size_t>(m.cols) * 4);
        k.encode(m.acts(), line.data(), 0, m.groups, acts.data(), n, t);
    }
    std::vector<float> padded(static_cast<size_t>(n) * m.out_padded());
    k.matmul(m, acts.data(), n, 0, m.blocks, padded.data(), m.out_padded());
    std::vector<float> y(static_cast<size_t>(n) * m.rows);
    for (int t = 0; t < n; ++t)
        std::memcpy(y.data() + static_cast<size_t>(t) * m.rows, padded.data() + static_cast<size_t>(t) * m.out_padded(),
                    static_cast<size_t>(m.rows) * 4);
    return numpy(std::move(y), {static_cast<size_t>(n), static_cast<size_t>(m.rows)});
}

Layer layer_of(const nb::dict& d) {
    Layer l;
    l.q = nb::cast<Matrix>(d["q"]);
    l.k = nb::cast<Matrix>(d["k"]);
    l.v = nb::cast<Matrix>(d["v"]);
    l.o = nb::cast<Matrix>(d["o"]);
    l.gate = nb::cast<Matrix>(d["gate"]);
    l.up = nb::cast<Matrix>(d["up"]);
    l.down = nb::cast<Matrix>(d["down"]);
    l.attn_norm = floats(d, "attn_norm");
    l.post_attn_norm = floats(d, "post_attn_norm");
    l.ffn_norm = floats(d, "ffn_norm");
    l.post_ffn_norm = floats(d, "post_ffn_norm");
    l.q_norm = floats(d, "q_norm");
    l.k_norm = floats(d, "k_norm");
    l.q_bias = floats(d, "q_bias");
    l.k_bias = floats(d, "k_bias");
    l.v_bias = floats(d, "v_bias");
    l.o_bias = floats(d, "o_bias");
    l.window = nb::cast<int>(d["window"]);
    l.rope = nb::cast<int>(d["rope"]);
    return l;
}

std::unique_ptr<Model> model_of(const nb::dict& c, const nb::list& layers, const Matrix& embedding, const Matrix& head,
                                const Floats& final_norm, const nb::list& ropes, const std::string& isa, int threads,
                                bool kv_f32, int64_t kv_limit) {
    Config config{};
    config.vocab = nb::cast<int>(c["vocab"]);
    config.hidden = nb::cast<int>(c["hidden"]);
    config.heads = nb::cast<int>(c["heads"]);
    config.kv_heads = nb::cast<int>(c["kv_heads"]);
    config.head_dim = nb::cast<int>(c["head_dim"]);
    config.ffn = nb::cast<int>(c["ffn"]);
    config.eps = nb::cast<float>(c["eps"]);
    config.attention_scale = nb::cast<float>(c["attention_scale"]);
    config.embedding_scale = nb::cast<float>(c["embedding_scale"]);
    const std::string activation = nb::cast<std::string>(c["activation"]);
    if (activation != "silu" && activation != "gelu_tanh") throw std::invalid_argument("unknown activation '" + activation + "'");
    config.activation = activation == "silu" ? Activation::Silu : Activation::GeluTanh;
    config.max_length = nb::cast<int>(c["max_length"]);
    std::vector<Layer> built;
    for (const nb::handle layer : layers) built.push_back(layer_of(nb::cast<nb::dict>(layer)));
    std::vector<std::vector<float>> tables;
    for (const nb::handle rope : ropes) {
        const Floats table = nb::cast<Floats>(rope);
        tables.emplace_back(table.data(), table.data() + table.shape(0));
    }
    return std::make_unique<Model>(config, std::move(built), embedding, head,
                                   std::vector<float>(final_norm.data(), final_norm.data() + final_norm.shape(0)),
                                   std::move(tables), kernels_for(isa), threads, kv_f32, kv_limit);
}

std::unique_ptr<Result> forward(Model& model, const Ints& token, const Ints& row, const Ints& position, const Ints& parent,
                                const Ints& starts, const Ints& wanted, const std::vector<int>& taps, int layers) {
    const size_t n = token.shape(0);
    if (row.shape(0) != n || position.shape(0) != n || parent.shape(0) != n || starts.shape(0) < 1)
        throw std::invalid_argument("malformed batch: its arrays differ in length");
    const BatchView batch{static_cast<int>(n), static_cast<int>(starts.shape(0)) - 1, static_cast<int>(wanted.shape(0)),
                          token.data(), row.data(), position.data(), parent.data(), starts.data(), wanted.data(), taps, layers};
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(model.lock());
    return model.forward(batch);
}

nb::object best_of(const Result& result, const Ints& at) {
    std::vector<int32_t> tokens(at.shape(0));
    for (size_t i = 0; i < tokens.size(); ++i) {
        const Best& best = result.best[static_cast<size_t>(result.find(at.data()[i]))];
        tokens[i] = best.nan ? -2 : best.value == -INFINITY ? -1 : best.index;
    }
    return numpy(std::move(tokens), {at.shape(0)});
}

// One rule as Python describes it: (name, arrays and numbers ...); see native.py.
Edit edit_of(const nb::tuple& rule) {
    const auto ints = [](nb::handle h) {
        const Ints a = nb::cast<Ints>(h);
        return std::vector<int32_t>(a.data(), a.data() + a.shape(0));
    };
    const auto numbers = [](nb::handle h) {
        const Floats a = nb::cast<Floats>(h);
        return std::vector<float>(a.data(), a.data() + a.shape(0));
    };
    Edit edit;
    const std::string name = nb::cast<std::string>(rule[0]);
    edit.ids = ints(rule[1]);
    if (name == "penalties") {
        edit.kind = Edit::Penalties;
        edit.output = ints(rule[2]);
        edit.values = numbers(rule[3]);
        edit.repetition = nb::cast<float>(rule[4]);
        edit.presence = nb::cast<float>(rule[5]);
        edit.frequency = nb::cast<float>(rule[6]);
        if (edit.values.size() != edit.output.size()) throw std::invalid_argument("penalties need a count for each token");
    } else if (name == "bias") {
        edit.kind = Edit::Bias;
        edit.values = numbers(rule[2]);
        if (edit.values.size() != edit.ids.size()) throw std::invalid_argument("a bias needs a value for each token");
    } else if (name == "allowed") {
        edit.kind = Edit::Allowed;
    } else {
        throw std::invalid_argument("unknown rule '" + name + "'");
    }
    return edit;
}

// A token, or below 0: -1 none is allowed, -2 NaN, -3 too close to a filter's edge to decide here.
int choose_one(const float* logits, int vocab, const nb::list& rules, double temperature, int top_k, double top_p,
               double log_min_p, uint64_t seed, uint32_t sample, uint32_t index, uint32_t stream, const Kernels& kernels) {
    std::vector<Edit> edits;
    for (const nb::handle rule : rules) edits.push_back(edit_of(nb::cast<nb::tuple>(rule)));
    const Sampling sampling{temperature, top_k, top_p, log_min_p, seed, sample, index, stream};
    nb::gil_scoped_release release;
    return choose(logits, vocab, edits, sampling, kernels);
}

int choose_of(const Result& result, int32_t at, const nb::list& rules, double temperature, int top_k, double top_p,
              double log_min_p, uint64_t seed, uint32_t sample, uint32_t index, uint32_t stream) {
    return choose_one(result.logits(result.find(at)), result.vocab, rules, temperature, top_k, top_p, log_min_p, seed, sample,
                      index, stream, *result.kernels);
}

int choose_from(const Floats& logits, const nb::list& rules, double temperature, int top_k, double top_p, double log_min_p,
                uint64_t seed, uint32_t sample, uint32_t index, uint32_t stream, const std::string& isa) {
    if (logits.shape(0) == 0) throw std::invalid_argument("there are no logits to choose from");
    return choose_one(logits.data(), static_cast<int>(logits.shape(0)), rules, temperature, top_k, top_p, log_min_p, seed,
                      sample, index, stream, kernels_for(isa));
}

// verify.walk_row on the target's own choices, of a request without rules: tokens gained and nodes kept, or None where
// that is not decided here (see choose.h). Node n's logits are those of packed index start + 1 + n.
nb::object walk(const Result& result, int32_t start, const Ints& tokens, const std::optional<Ints>& parents, double temperature,
                int top_k, double top_p, double log_min_p, uint64_t seed, uint32_t sample, uint32_t index, uint32_t stream) {
    const auto k = static_cast<int>(tokens.shape(0));
    if (parents && parents->shape(0) != tokens.shape(0)) throw std::invalid_argument("tokens and parents differ in length");
    std::vector<int32_t> gained, path;
    for (int at = -1;;) {
        const int found = result.find(start + 1 + at);
        int choice;
        if (temperature == 0.0) {
            const Best& best = result.best[static_cast<size_t>(found)];
            choice = best.nan || best.value == -INFINITY ? kNaN : best.index;
        } else {
            const Sampling sampling{temperature, top_k, top_p, log_min_p, seed, sample, index + static_cast<uint32_t>(gained.size()), stream};
            nb::gil_scoped_release release;
            choice = choose(result.logits(found), result.vocab, {}, sampling, *result.kernels);
        }
        if (choice < 0) return nb::none();
        gained.push_back(choice);
        int child = at + 1;
        while (child < k && (tokens.data()[child] != choice || (parents ? parents->data()[child] : child - 1) != at))
            child = parents ? child + 1 : k;
        if (child >= k) break;
        path.push_back(child);
        at = child;
    }
    const size_t n = gained.size(), m = path.size();
    return nb::make_tuple(numpy(std::move(gained), {n}), numpy(std::move(path), {m}));
}

nb::object logits_of(const Result& result, const Ints& at) {
    const size_t vocab = static_cast<size_t>(result.vocab);
    std::vector<float> values(at.shape(0) * vocab);
    for (size_t i = 0; i < at.shape(0); ++i)
        std::memcpy(values.data() + i * vocab, result.logits(result.find(at.data()[i])), vocab * sizeof(float));
    return numpy(std::move(values), {at.shape(0), vocab});
}

nb::object taps_of(const Result& result, const Ints& at) {
    const size_t taps = static_cast<size_t>(result.tap_count), hidden = static_cast<size_t>(result.hidden);
    std::vector<float> values(at.shape(0) * taps * hidden);
    for (size_t i = 0; i < at.shape(0); ++i) {
        const int32_t t = at.data()[i];
        if (t < 0 || t >= result.tokens) throw std::out_of_range("packed index " + std::to_string(t) + " is not in the batch");
        std::memcpy(values.data() + i * taps * hidden, result.taps.data() + static_cast<size_t>(t) * taps * hidden,
                    taps * hidden * sizeof(float));
    }
    return numpy(std::move(values), {at.shape(0), taps, hidden});
}

// Seconds that the threads take to read `bytes` of fresh memory once, the best of `repeats`: what a forward is up against.
double read_seconds(size_t bytes, int threads, int repeats) {
    nb::gil_scoped_release release;
    Arena arena;
    const std::shared_ptr<uint8_t> memory = arena.take(bytes);
    std::memset(memory.get(), 1, bytes);
    Pool pool(threads);
    std::vector<uint64_t> sums(static_cast<size_t>(threads) * 8);
    double best = 1e9;
    for (int r = 0; r < repeats; ++r) {
        const auto start = std::chrono::steady_clock::now();
        pool.run([&](Seat& me) {
            const size_t words = bytes / 64 / static_cast<size_t>(me.count) * 8;
            const uint64_t* p = reinterpret_cast<const uint64_t*>(memory.get()) + words * static_cast<size_t>(me.rank);
            uint64_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
            for (size_t i = 0; i < words; i += 8) {
                __builtin_prefetch(p + i + 512);
                a += p[i], b += p[i + 1], c += p[i + 2], d += p[i + 3];
                e += p[i + 4], f += p[i + 5], g += p[i + 6], h += p[i + 7];
            }
            sums[static_cast<size_t>(me.rank) * 8] += a + b + c + d + e + f + g + h;
        });
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return sums[0] == 0 ? 0.0 : best;
}

template <class F>
auto locked(Model& model, F f) {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(model.lock());
    return f(model.kv());
}

}  // namespace
}  // namespace outpace

NB_MODULE(_native, m) {
    using namespace outpace;
    nb::set_leak_warnings(false);  // a model that lives until the interpreter ends is no leak
    nb::exception<MemoryLimit>(m, "MemoryLimit", PyExc_RuntimeError);
    m.def("usable_isas", &usable_isas);
    m.def("kernels", [](const std::string& isa) { return std::string(kernels_for(isa).name); }, "isa"_a = "");
    m.def("read_seconds", &read_seconds, "bytes"_a, "threads"_a, "repeats"_a);
    m.def("row_bytes", &row_bytes, "source"_a, "cols"_a);
    bind_drafting(m);
    nb::class_<Arena>(m, "Arena").def(nb::init<>());
    nb::class_<Matrix>(m, "Matrix")
        .def_ro("rows", &Matrix::rows)
        .def_ro("cols", &Matrix::cols)
        .def_prop_ro("bytes", &Matrix::bytes)
        .def_prop_ro("format", [](const Matrix& x) { return name_of(x.format); })
        .def("unpack", &unpack)
        .def("product", &product, "x"_a, "isa"_a = "");
    m.def("pack", &pack_bytes, "arena"_a, "data"_a, "source"_a, "rows"_a, "cols"_a, "heads"_a = 0, "target"_a = "keep",
          "threads"_a = 1);
    m.def("choose", &choose_from, "logits"_a, "rules"_a, "temperature"_a, "top_k"_a, "top_p"_a, "log_min_p"_a, "seed"_a,
          "sample"_a, "index"_a, "stream"_a, "isa"_a = "");
    nb::class_<Result>(m, "Result")
        .def("best", &best_of, "at"_a)
        .def("choose", &choose_of, "at"_a, "rules"_a, "temperature"_a, "top_k"_a, "top_p"_a, "log_min_p"_a, "seed"_a,
             "sample"_a, "index"_a, "stream"_a)
        .def("walk", &walk, "start"_a, "tokens"_a, "parents"_a.none(), "temperature"_a, "top_k"_a, "top_p"_a, "log_min_p"_a,
             "seed"_a, "sample"_a, "index"_a, "stream"_a)
        .def("logits", &logits_of, "at"_a)
        .def("taps", &taps_of, "at"_a);
    nb::class_<Model>(m, "Model")
        .def_static("build", &model_of, "config"_a, "layers"_a, "embedding"_a, "head"_a, "final_norm"_a, "ropes"_a, "isa"_a,
                    "threads"_a, "kv_f32"_a, "kv_limit"_a)
        .def("forward", &forward, "token"_a, "row"_a, "position"_a, "parent"_a, "starts"_a, "wanted"_a, "taps"_a, "layers"_a)
        .def_prop_ro("isa", [](const Model& x) { return x.kernels().name; })
        .def_prop_ro("threads", &Model::threads)
        .def_prop_ro("weight_bytes", &Model::weight_bytes)
        .def("time_phases", &Model::time_phases, "on"_a)
        .def("take_timings",
             [](Model& x) {
                 const auto seconds = x.take_timings();
                 nb::dict named;
                 for (int i = 0; i < kPhases; ++i) named[kPhaseNames[i]] = seconds[static_cast<size_t>(i)];
                 return named;
             })
        .def("kv_alloc", [](Model& x, int64_t n) { return locked(x, [&](KV& kv) { return kv.alloc(n); }); })
        .def("kv_free", [](Model& x, int row) { locked(x, [&](KV& kv) { kv.free(row); }); })
        .def("kv_length", [](Model& x, int row) { return locked(x, [&](KV& kv) { return kv.length(row); }); })
        .def("kv_capacity", [](Model& x, int row) { return locked(x, [&](KV& kv) { return kv.capacity(row); }); })
        .def("kv_truncate", [](Model& x, int row, int n) { locked(x, [&](KV& kv) { kv.truncate(row, n); }); })
        .def("kv_compact",
             [](Model& x, int row, int start, const Ints& keep) {
                 locked(x, [&](KV& kv) { kv.compact(row, start, keep.data(), static_cast<int>(keep.shape(0))); });
             })
        .def("kv_fork", [](Model& x, int src, int dst, int n) { locked(x, [&](KV& kv) { kv.fork(src, dst, n); }); })
        .def("kv_bytes_for", [](Model& x, int64_t n) { return x.kv().bytes_for(n); })
        .def_prop_ro("kv_bytes", [](Model& x) { return locked(x, [](KV& kv) { return kv.bytes(); }); })
        .def_prop_ro("kv_held", [](Model& x) { return locked(x, [](KV& kv) { return kv.held(); }); })
        .def_prop_ro("kv_rows", [](Model& x) { return locked(x, [](KV& kv) { return kv.rows(); }); })
        .def("kv_check", [](Model& x) { locked(x, [](KV& kv) { kv.check(); }); })
        .def("kv_poison", [](Model& x) { locked(x, [](KV& kv) { kv.poison(); }); });
}
