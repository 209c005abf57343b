// What Python sees of weights, the runtime that models share, and a model's KV cache.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "bindings/bindings.h"
#include "model/model.h"
#include "runtime/cpu.h"

namespace outpace {
namespace {

// Fields by name; one that is not described stays as it is.
template <class T, class To>
void read(const nb::dict& from, To& to, std::initializer_list<std::pair<const char*, T To::*>> fields) {
    for (const auto& [name, field] : fields) {
        if (!from.contains(name)) continue;
        if constexpr (std::is_same_v<T, std::vector<float>>)
            to.*field = values_of(nb::cast<Floats>(from[name]));
        else
            to.*field = nb::cast<T>(from[name]);
    }
}

Experts experts_of(const nb::dict& d) {
    Experts e{};
    read<int, Experts>(d, e,
        {{"count", &Experts::count}, {"used", &Experts::used}, {"inner", &Experts::inner}, {"shared", &Experts::shared},
            {"groups", &Experts::groups}, {"used_groups", &Experts::used_groups}});
    read<bool, Experts>(d, e, {{"renormalise", &Experts::renormalise}, {"best_two", &Experts::best_two}});
    read<float, Experts>(d, e, {{"least_total", &Experts::least_total}, {"scale", &Experts::scale}});
    read<Matrix, Experts>(d, e, {{"router", &Experts::router}, {"gate", &Experts::gate}, {"up", &Experts::up}, {"down", &Experts::down}});
    read<std::vector<float>, Experts>(d, e,
        {{"router_bias", &Experts::router_bias}, {"choice_bias", &Experts::choice_bias}, {"gate_bias", &Experts::gate_bias},
            {"up_bias", &Experts::up_bias}, {"down_bias", &Experts::down_bias}, {"expert_scale", &Experts::expert_scale},
            {"router_norm", &Experts::router_norm}, {"norm", &Experts::norm}, {"post_norm", &Experts::post_norm},
            {"shared_post_norm", &Experts::shared_post_norm}});
    const std::string score = nb::cast<std::string>(d["score"]);
    if (score != "softmax" && score != "sigmoid" && score != "of_chosen") throw std::invalid_argument("unknown score '" + score + "'");
    e.score = score == "softmax" ? Score::Softmax : score == "sigmoid" ? Score::Sigmoid : Score::OfChosen;
    return e;
}

DeltaNet delta_of(const nb::dict& d) {
    DeltaNet net{};
    read<int, DeltaNet>(d, net,
        {{"key_heads", &DeltaNet::key_heads}, {"value_heads", &DeltaNet::value_heads}, {"key_dim", &DeltaNet::key_dim},
            {"value_dim", &DeltaNet::value_dim}, {"taps", &DeltaNet::taps}});
    read<bool, DeltaNet>(d, net, {{"tiled", &DeltaNet::tiled}});
    read<Matrix, DeltaNet>(
        d, net, {{"qkv", &DeltaNet::qkv}, {"z", &DeltaNet::z}, {"b", &DeltaNet::b}, {"a", &DeltaNet::a}, {"o", &DeltaNet::o}});
    read<float, DeltaNet>(d, net,
        {{"gate_scale", &DeltaNet::gate_scale}, {"step_scale", &DeltaNet::step_scale}, {"output_scale", &DeltaNet::output_scale},
            {"attended_scale", &DeltaNet::attended_scale}});
    read<std::vector<float>, DeltaNet>(d, net,
        {{"convolution", &DeltaNet::convolution}, {"decay", &DeltaNet::decay}, {"dt_bias", &DeltaNet::dt_bias}, {"norm", &DeltaNet::norm},
            {"convolution_bias", &DeltaNet::convolution_bias}, {"skip", &DeltaNet::skip}});
    if (net.key_heads < 1) throw std::invalid_argument("a recurrent layer has no heads");
    return net;
}

ShortConv conv_of(const nb::dict& d) {
    ShortConv conv{};
    read<int, ShortConv>(d, conv, {{"taps", &ShortConv::taps}});
    read<Matrix, ShortConv>(d, conv, {{"in", &ShortConv::in}});
    read<std::vector<float>, ShortConv>(d, conv, {{"convolution", &ShortConv::convolution}});
    if (conv.taps < 1) throw std::invalid_argument("a short convolution has no taps");
    return conv;
}

LocalConv local_conv_of(const nb::dict& d) {
    LocalConv conv{};
    read<int, LocalConv>(d, conv, {{"taps", &LocalConv::taps}, {"group", &LocalConv::group}, {"block", &LocalConv::block}});
    read<Matrix, LocalConv>(d, conv, {{"project", &LocalConv::project}});
    read<std::vector<float>, LocalConv>(d, conv, {{"base", &LocalConv::base}});
    if (conv.taps < 1) throw std::invalid_argument("a convolution over a block has no taps");
    return conv;
}

Latent latent_of(const nb::dict& d) {
    Latent a{};
    read<int, Latent>(d, a, {{"rank", &Latent::rank}, {"plain", &Latent::plain}, {"rotated", &Latent::rotated}});
    read<bool, Latent>(d, a, {{"neighbours", &Latent::neighbours}});
    read<float, Latent>(d, a, {{"eps", &Latent::eps}});
    read<Matrix, Latent>(d, a, {{"q_down", &Latent::q_down}, {"k_up", &Latent::k_up}, {"v_up", &Latent::v_up}});
    if (a.rank < 1) throw std::invalid_argument("latent vectors have no size");
    return a;
}

Layer layer_of(const Named& d) {
    Layer l{};
    if (d.contains("latent")) l.latent = latent_of(nb::cast<nb::dict>(d["latent"]));
    if (d.contains("experts")) l.experts = experts_of(nb::cast<nb::dict>(d["experts"]));
    if (d.contains("conv")) l.conv = conv_of(nb::cast<nb::dict>(d["conv"]));
    if (d.contains("delta")) l.delta = delta_of(nb::cast<nb::dict>(d["delta"]));
    if (d.contains("attn_conv")) l.attn_conv = local_conv_of(nb::cast<nb::dict>(d["attn_conv"]));
    if (d.contains("ffn_conv")) l.ffn_conv = local_conv_of(nb::cast<nb::dict>(d["ffn_conv"]));
    read<Matrix, Layer>(d, l,
        {{"q", &Layer::q}, {"k", &Layer::k}, {"v", &Layer::v}, {"o", &Layer::o}, {"gate", &Layer::gate}, {"up", &Layer::up},
            {"down", &Layer::down}, {"join", &Layer::join}});
    read<std::vector<float>, Layer>(d, l,
        {{"attn_norm", &Layer::attn_norm}, {"post_attn_norm", &Layer::post_attn_norm}, {"ffn_norm", &Layer::ffn_norm},
            {"post_ffn_norm", &Layer::post_ffn_norm}, {"q_norm", &Layer::q_norm}, {"k_norm", &Layer::k_norm}, {"q_bias", &Layer::q_bias},
            {"k_bias", &Layer::k_bias}, {"v_bias", &Layer::v_bias}, {"o_bias", &Layer::o_bias}, {"embed_norm", &Layer::embed_norm},
            {"features_norm", &Layer::features_norm}, {"sinks", &Layer::sinks}, {"v_norm", &Layer::v_norm}});
    read<int, Layer>(d, l,
        {{"window", &Layer::window}, {"rope", &Layer::rope}, {"kv_heads", &Layer::kv_heads}, {"head_dim", &Layer::head_dim},
            {"shares", &Layer::shares}});
    read<float, Layer>(d, l, {{"output_scale", &Layer::output_scale}, {"fed_scale", &Layer::fed_scale}});
    if (d.contains("input")) {
        const nb::dict input = nb::cast<nb::dict>(d["input"]);
        read<Matrix, InputGate>(input, l.input, {{"gate", &InputGate::gate}, {"project", &InputGate::project}});
        read<std::vector<float>, InputGate>(input, l.input, {{"norm", &InputGate::norm}});
    }
    read<bool, Layer>(
        d, l, {{"norm_first", &Layer::norm_first}, {"gated", &Layer::gated}, {"causal", &Layer::causal}, {"anchored", &Layer::anchored}});
    return l;
}

void make_weights(Weights* self, const Named& c, const SequenceOf<Named>& layers, const Matrix& embedding, const Matrix& head,
    const Floats& final_norm, const std::vector<std::tuple<Floats, float, float, int>>& ropes, const std::optional<Named>& inputs) {
    Config config{};
    config.outputs = nb::cast<int>(c["vocab"]);
    read<int, Config>(c, config,
        {{"vocab", &Config::vocab}, {"hidden", &Config::hidden}, {"heads", &Config::heads}, {"kv_heads", &Config::kv_heads},
            {"head_dim", &Config::head_dim}, {"ffn", &Config::ffn}, {"max_length", &Config::max_length}, {"outputs", &Config::outputs}});
    read<float, Config>(c, config,
        {{"eps", &Config::eps}, {"attention_scale", &Config::attention_scale}, {"embedding_scale", &Config::embedding_scale},
            {"residual_scale", &Config::residual_scale}, {"score_cap", &Config::score_cap}, {"logit_cap", &Config::logit_cap}});
    read<bool, Config>(c, config, {{"beside", &Config::beside}});
    const std::string activation = nb::cast<std::string>(c["activation"]);
    static const std::map<std::string, Activation> activations{{"silu", Activation::Silu}, {"gelu_tanh", Activation::GeluTanh},
        {"clamped_silu", Activation::ClampedSilu}, {"relu2", Activation::Relu}};
    const auto known = activations.find(activation);
    if (known == activations.end()) throw std::invalid_argument("unknown activation '" + activation + "'");
    config.activation = known->second;
    std::vector<Layer> built;
    for (const nb::handle layer : layers) built.push_back(layer_of(nb::cast<nb::dict>(layer)));
    std::vector<RopeTable> tables;
    for (const auto& [frequencies, scale, growth, period] : ropes) tables.push_back({values_of(frequencies), scale, growth, period});
    LayerInputs made{};
    if (inputs) {
        read<int, LayerInputs>(*inputs, made, {{"width", &LayerInputs::width}});
        read<Matrix, LayerInputs>(*inputs, made, {{"table", &LayerInputs::table}, {"project", &LayerInputs::project}});
        read<std::vector<float>, LayerInputs>(*inputs, made, {{"norm", &LayerInputs::norm}});
    }
    new (self) Weights(config, std::move(built), embedding, head, values_of(final_norm), std::move(tables), std::move(made));
}

void make_runtime(Runtime* self, int threads) {
    if (threads < 1 || threads > 256) throw std::invalid_argument("threads=" + std::to_string(threads) + " is out of range: give 1 to 256");
    new (self) Runtime(threads);
}

void make_model(Model* self, std::shared_ptr<Weights> weights, std::shared_ptr<Runtime> runtime, const std::string& isa,
    const std::string& kv_dtype, int64_t kv_limit, bool windowed, std::shared_ptr<Model> beside) {
    KVType type = KVType::BF16;
    if (kv_dtype == "float32")
        type = KVType::F32;
    else if (kv_dtype == "float16")
        type = KVType::F16;
    else if (kv_dtype == "int8")
        type = KVType::I8;
    else if (kv_dtype == "int4")
        type = KVType::I4;
    else if (kv_dtype != "bfloat16")
        throw std::invalid_argument("kv_dtype='" + kv_dtype + "' is not known: use bfloat16, float16, float32, int8 or int4");
    new (self) Model(std::move(weights), std::move(runtime), kernels_for(isa), type, kv_limit, windowed, std::move(beside));
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

std::optional<nb::bytes> export_block(Model& model, int row, int block, bool windowed) {
    const int pool = windowed ? kWindowed : kFull;
    nb::bytes data(nullptr, model.kv().shape().block[static_cast<size_t>(pool)]);
    auto* to = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(data.ptr()));
    if (!locked(model, [&](KV& kv) { return kv.export_block(row, pool, block, to); })) return std::nullopt;
    return data;
}

void import_block(Model& model, int row, const Bytes& data, const std::optional<Bytes>& window, int positions) {
    const auto& bytes = model.kv().shape().block;
    if (data.size() != bytes[kFull] || (window && window->size() != bytes[kWindowed]))
        throw std::invalid_argument("a KV block has other bytes");
    locked(model, [&](KV& kv) { kv.import_block(row, data.data(), window ? window->data() : nullptr, positions); });
}

nb::bytes export_state(Model& model, int row, int positions) {
    std::vector<float> state(model.kv().states().given_floats());
    locked(model, [&](KV& kv) { kv.states().give(row, positions, state.data()); });
    return nb::bytes(state.data(), 4 * state.size());
}

void import_state(Model& model, int row, const Bytes& data) {
    std::vector<float> state(model.kv().states().given_floats());
    if (data.size() != 4 * state.size()) throw std::invalid_argument("a recurrent state has other bytes");
    std::memcpy(state.data(), data.data(), data.size());
    locked(model, [&](KV& kv) { kv.import_state(row, state.data()); });
}

template <class F>
auto of_pool(Runtime& runtime, F f) {
    return with_lock(runtime.lock(), [&] { return f(runtime.pool()); });
}
template <auto value>
auto pool_value(Runtime& runtime) {
    return of_pool(runtime, [](Pool& pool) { return (pool.*value)(); });
}

// A run to whose barrier the last thread comes late, asleep or at work so long, and after which every thread is at work for
// `after` seconds; a lone thread is at work for 20 ms before. See Pool::pretend. Which team such a run has next.
int late_run(Runtime& runtime, double seconds, bool sleeps, double away, double lost, double after, unsigned kind) {
    if (kind > Pool::kDrafting) throw std::invalid_argument("no kind of run");
    return of_pool(runtime, [&](Pool& pool) {
        pool.pretend(away, lost);
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
        pool.pretend(-1.0, -1.0);
        return pool.team(kind);
    });
}

}  // namespace

void bind_runtime(nb::module_& m, nb::class_<Model>& model) {
    nb::class_<Weights>(
        m, "Weights", "A decoder's packed weights; any number of models can share them. Raises ValueError for what does not fit.")
        .def("__init__", &make_weights, "config"_a, "layers"_a, "embedding"_a, "head"_a, "final_norm"_a, "ropes"_a, "inputs"_a = nb::none())
        .def_prop_ro("bytes", &Weights::bytes);
    nb::class_<Runtime>(m, "Runtime",
        "Threads, working memory and a lock for models that compute in turn. Raises ValueError, RuntimeError.\nA child of os.fork gets "
        "threads of its own when it first computes; the fork waits for a forward under way.")
        .def("__init__", &make_runtime, "threads"_a)
        .def_prop_ro("threads", &Runtime::threads)
        .def_prop_ro("team", [](Runtime& x) { return of_pool(x, [](Pool& pool) { return pool.team(); }); })
        .def_prop_ro("drops", [](Runtime& x) { return std::make_pair(pool_value<&Pool::dropped>(x), pool_value<&Pool::waited>(x)); },
            "Runs that went on with fewer threads since others used the cores; slow ones that kept theirs: nobody did.")
        .def_prop_rw("claims", &pool_value<&Pool::uneven>,
            [](Runtime& x, bool claims) { of_pool(x, [&](Pool& pool) { pool.treat_as_uneven(claims); }); },
            "Whether threads claim a half of every product, since cores differ: measured when they began, or as it was set.")
        .def("late_run", &late_run, "seconds"_a, "sleeps"_a, "away"_a, "lost"_a = -1.0, "after"_a = 0.0, "kind"_a = 0u,
            "For tests: a run whose last thread is late, asleep or at work. away, lost: see Pool::pretend. The team then.")
        .def_prop_ro("wake_seconds", &pool_value<&Pool::wake_seconds>)
        .def_prop_ro("hand_over_seconds", &pool_value<&Pool::hand_over_seconds>);
    m.attr("KV_BLOCK") = kBlock;
    model
        .def("__init__", &make_model, "weights"_a, "runtime"_a, "isa"_a, "kv_dtype"_a, "kv_limit"_a, "windowed"_a = true,
            "beside"_a = nb::none())
        .def("kv_alloc", [](Model& x) { return locked(x, [](KV& kv) { return kv.alloc(); }); })
        .def("kv_free", [](Model& x, int row) { locked(x, [&](KV& kv) { kv.free(row); }); })
        .def("kv_length", [](Model& x, int row) { return locked(x, [&](KV& kv) { return kv.length(row); }); })
        .def("kv_reachable", [](Model& x, int row, int n) { return locked(x, [&](KV& kv) { return kv.reachable(row, n); }); })
        .def("kv_keep", [](Model& x, int row) { locked(x, [&](KV& kv) { kv.keep(row); }); })
        .def("kv_export", &export_block, "row"_a, "block"_a, "windowed"_a,
            "A block's bytes, for `kv_import` into a model of the same `kv_layout`; None: the row has given it back.")
        .def("kv_import", &import_block, "row"_a, "data"_a, "window"_a.none(), "positions"_a)
        .def("kv_states", [](Model& x, int row) { return locked(x, [&](KV& kv) { return kv.state_ends(row); }); })
        .def("kv_export_state", &export_state, "row"_a, "positions"_a)
        .def("kv_import_state", &import_state, "row"_a, "data"_a)
        .def_prop_ro("kv_layout",
            [](Model& x) {
        const KV& kv = x.kv();
        const KVShape& shape = kv.shape();
        return std::make_tuple(
            static_cast<int>(shape.type), shape.block[kFull], shape.block[kWindowed], shape.window, 4 * kv.states().given_floats());
    }, "Type of keys and values, bytes of a block and of a windowed one, the longest window, and bytes of a recurrent state.")
        .def_prop_ro("windowed", [](Model& x) { return x.kv().windowed(); })
        .def_prop_ro("recurrent", [](Model& x) { return x.kv().states().shape().layers > 0; })
        .def("kv_truncate", [](Model& x, int row, int n) { locked(x, [&](KV& kv) { kv.truncate(row, n); }); })
        .def("kv_compact",
            [](Model& x, int row, int start, const Ints& keep) {
        const std::vector<int32_t> its = copied(keep);
        locked(x, [&](KV& kv) { kv.compact(row, start, its.data(), static_cast<int>(its.size())); });
    })
        .def("kv_fork", [](Model& x, int src, int dst, int n) { locked(x, [&](KV& kv) { kv.fork(src, dst, n); }); })
        .def("kv_growth",
            [](Model& x, int row, int64_t n, int64_t settled) { return locked(x, [&](KV& kv) { return kv.growth(row, n, settled); }); },
            nb::arg("row"), nb::arg("n"), nb::arg("settled") = 0)
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
