// What Python sees of weights, the runtime that models share, and a model's KV cache.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "bindings/bindings.h"
#include "model/model.h"
#include "runtime/cpu.h"

namespace outpace {
namespace {

std::vector<float> floats(const nb::dict& d, const char* key) {
    if (!d.contains(key)) return {};
    const Floats array = nb::cast<Floats>(d[key]);
    return {array.data(), array.data() + array.shape(0)};
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
    l.embed_norm = floats(d, "embed_norm");
    l.norm_first = d.contains("norm_first") && nb::cast<bool>(d["norm_first"]);
    return l;
}

void make_weights(Weights* self, const nb::dict& c, const nb::list& layers, const Matrix& embedding, const Matrix& head,
    const Floats& final_norm, const nb::list& ropes) {
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
    config.outputs = c.contains("outputs") ? nb::cast<int>(c["outputs"]) : config.vocab;
    if (c.contains("rope_scale")) config.rope_scale = nb::cast<float>(c["rope_scale"]);
    if (c.contains("residual_scale")) config.residual_scale = nb::cast<float>(c["residual_scale"]);
    std::vector<Layer> built;
    for (const nb::handle layer : layers) built.push_back(layer_of(nb::cast<nb::dict>(layer)));
    std::vector<std::vector<float>> tables;
    for (const nb::handle rope : ropes) {
        const Floats table = nb::cast<Floats>(rope);
        tables.emplace_back(table.data(), table.data() + table.shape(0));
    }
    new (self) Weights(config, std::move(built), embedding, head,
        std::vector<float>(final_norm.data(), final_norm.data() + final_norm.shape(0)), std::move(tables));
}

void make_runtime(Runtime* self, int threads) {
    if (threads < 1 || threads > 256) throw std::invalid_argument("threads=" + std::to_string(threads) + " is out of range: give 1 to 256");
    new (self) Runtime(threads);
}

void make_model(Model* self, std::shared_ptr<Weights> weights, std::shared_ptr<Runtime> runtime, const std::string& isa,
    const std::string& kv_dtype, int64_t kv_limit) {
    KVType type = KVType::BF16;
    if (kv_dtype == "float32")
        type = KVType::F32;
    else if (kv_dtype == "int8")
        type = KVType::I8;
    else if (kv_dtype != "bfloat16")
        throw std::invalid_argument("kv_dtype='" + kv_dtype + "' is not known: use bfloat16, float32 or int8");
    new (self) Model(std::move(weights), std::move(runtime), kernels_for(isa), type, kv_limit);
}

// What is asked of the cache takes microseconds, and a GIL given up for it would be another thread's for milliseconds: it is
// kept, unless a forward holds the lock.
template <class F>
auto locked(Model& model, F f) {
    std::unique_lock<std::mutex> lock(model.lock(), std::try_to_lock);
    if (lock) return f(model.kv());
    nb::gil_scoped_release release;
    lock.lock();
    struct First {  // the lock goes before the GIL comes back
        std::unique_lock<std::mutex>& its;
        ~First() { its.unlock(); }
    } const first{lock};
    return f(model.kv());
}

template <class F>
auto of_pool(Runtime& runtime, F f) {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(runtime.lock());
    return f(runtime.pool());
}

// A run to whose barrier the last thread comes late, asleep or at work so long, and after which every thread is at work for
// `after` seconds; a lone thread is at work for 20 ms before. See Pool::pretend. Which team such a run has next.
int late_run(Runtime& runtime, double seconds, bool sleeps, double away, double after, unsigned kind) {
    if (kind > Pool::kDrafting) throw std::invalid_argument("no kind of run");
    return of_pool(runtime, [&](Pool& pool) {
        pool.pretend(away);
        pool.run([&](Seat& me) {
            if (me.rank == me.count - 1) {
                const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(me.count > 1 ? seconds : 0.02);
                if (sleeps) std::this_thread::sleep_until(end);
                while (std::chrono::steady_clock::now() < end) {}
            }
            if (!pool.meet(me)) return;
            const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(after);
            while (std::chrono::steady_clock::now() < end) {}
        }, kind);
        pool.pretend(-1.0);
        return pool.team(kind);
    });
}

}  // namespace

void bind_runtime(nb::module_& m, nb::class_<Model>& model) {
    nb::class_<Weights>(m, "Weights")
        .def("__init__", &make_weights, "config"_a, "layers"_a, "embedding"_a, "head"_a, "final_norm"_a, "ropes"_a)
        .def_prop_ro("bytes", &Weights::bytes);
    nb::class_<Runtime>(m, "Runtime")
        .def("__init__", &make_runtime, "threads"_a)
        .def_prop_ro("threads", &Runtime::threads)
        .def_prop_ro("team", [](Runtime& x) { return of_pool(x, [](Pool& pool) { return pool.team(); }); })
        .def_prop_ro(
            "drops", [](Runtime& x) { return of_pool(x, [](Pool& pool) { return std::make_pair(pool.dropped(), pool.waited()); }); })
        .def_prop_rw("claims", [](Runtime& x) { return of_pool(x, [](Pool& pool) { return pool.uneven(); }); },
            [](Runtime& x, bool claims) {
        of_pool(x, [&](Pool& pool) {
            pool.treat_as_uneven(claims);
            return 0;
        });
    })
        .def("late_run", &late_run, "seconds"_a, "sleeps"_a, "away"_a, "after"_a = 0.0, "kind"_a = 0u)
        .def_prop_ro("wake_seconds", [](Runtime& x) {
        return of_pool(x, [](Pool& pool) { return pool.wake_seconds(); });
    }).def_prop_ro("hand_over_seconds", [](Runtime& x) { return of_pool(x, [](Pool& pool) { return pool.hand_over_seconds(); }); });
    m.attr("KV_BLOCK") = kBlock;
    model.def("__init__", &make_model, "weights"_a, "runtime"_a, "isa"_a, "kv_dtype"_a, "kv_limit"_a)
        .def("kv_alloc", [](Model& x) { return locked(x, [](KV& kv) { return kv.alloc(); }); })
        .def("kv_free", [](Model& x, int row) { locked(x, [&](KV& kv) { kv.free(row); }); })
        .def("kv_length", [](Model& x, int row) { return locked(x, [&](KV& kv) { return kv.length(row); }); })
        .def("kv_truncate", [](Model& x, int row, int n) { locked(x, [&](KV& kv) { kv.truncate(row, n); }); })
        .def("kv_compact",
            [](Model& x, int row, int start, const Ints& keep) {
        const std::vector<int32_t> its = copied(keep);
        locked(x, [&](KV& kv) { kv.compact(row, start, its.data(), static_cast<int>(its.size())); });
    })
        .def("kv_fork", [](Model& x, int src, int dst, int n) { locked(x, [&](KV& kv) { kv.fork(src, dst, n); }); })
        .def("kv_growth", [](Model& x, int row, int64_t n) { return locked(x, [&](KV& kv) { return kv.growth(row, n); }); })
        .def("kv_bytes_for", [](Model& x, int64_t n) { return x.kv().bytes_for(n); })
        .def("kv_exclusive", [](Model& x, const std::vector<int>& rows) { return locked(x, [&](KV& kv) { return kv.exclusive(rows); }); })
        .def_prop_ro("kv_bytes", [](Model& x) { return locked(x, [](KV& kv) { return kv.bytes(); }); })
        .def_prop_ro("kv_held", [](Model& x) { return locked(x, [](KV& kv) { return kv.held(); }); })
        .def_prop_ro("kv_rows", [](Model& x) { return locked(x, [](KV& kv) { return kv.rows(); }); })
        .def("kv_check", [](Model& x) {
        locked(x, [](KV& kv) { kv.check(); });
    }).def("kv_poison", [](Model& x) { locked(x, [](KV& kv) { kv.poison(); }); });
}

}  // namespace outpace
