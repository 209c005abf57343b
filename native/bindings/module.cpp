// What Python sees: outpace._native. Everything that comes from Python is checked here or in what it calls.
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "bindings/bindings.h"
#include "model/model.h"
#include "runtime/amx.h"
#include "runtime/cpu.h"
#include "runtime/denormals.h"
#include "weights/pack.h"
#include "weights/packed_file.h"

namespace outpace {
namespace {

Target target_of(const std::string& name) {
    for (size_t i = 0; i < std::size(kTargetNames); ++i)
        if (name == kTargetNames[i]) return static_cast<Target>(i);
    throw std::invalid_argument("unknown weight format '" + name + "': use keep, bf16, f16, f32, int8 or int4");
}

void checked_shape(int64_t rows, int64_t cols) {
    constexpr int64_t most = int64_t{1} << 30;
    if (rows <= 0 || cols <= 0 || rows > most || cols > most || rows * cols > (int64_t{1} << 40))
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " is not possible");
}

Matrix pack_bytes(
    Arena& arena, const Bytes& data, int source, int64_t rows, int64_t cols, int heads, const std::string& target, int threads) {
    checked_shape(rows, cols);
    const size_t expected = static_cast<size_t>(rows) * row_bytes(source, cols);
    if (data.size() != expected)
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " needs " +
                                    std::to_string(expected) + " bytes, got " + std::to_string(data.size()));
    const Target to = target_of(target);
    nb::gil_scoped_release release;
    return pack(arena, data.data(), source, static_cast<int>(rows), static_cast<int>(cols), heads, to, threads);
}

Matrix mapped_matrix(std::shared_ptr<PackedFile> file, size_t offset, int source, int64_t rows, int64_t cols, const std::string& target) {
    checked_shape(rows, cols);
    return matrix_at(std::move(file), offset, source, static_cast<int>(rows), static_cast<int>(cols), target_of(target));
}

bool checked_row(const Matrix& m, int64_t row, const Bytes& stored, int source, const std::string& target) {
    if (row < 0 || row >= m.rows || stored.size() != row_bytes(source, m.cols))
        throw std::invalid_argument(
            "row " + std::to_string(row) + " of " + std::to_string(stored.size()) + " bytes does not fit the matrix");
    return row_is(m, static_cast<int>(row), stored.data(), source, target_of(target));
}

U8 packed(const Matrix& m) {
    auto* kept = new std::shared_ptr<void>(m.memory);
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
    const size_t shape[] = {m.bytes()};
    return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(m.data, 1, shape, owner));
}

F32 unpack(const Matrix& m) {
    std::vector<float> values(static_cast<size_t>(m.rows) * static_cast<size_t>(m.cols));
    for (int r = 0; r < m.rows; ++r) unpack_row(m, r, values.data() + static_cast<size_t>(r) * static_cast<size_t>(m.cols));
    return numpy(std::move(values), {static_cast<size_t>(m.rows), static_cast<size_t>(m.cols)});
}

F32 product(const Matrix& m, const Matrixf& x, const std::string& isa) {
    const Kernels& k = kernels_for(isa);
    const DenormalsAsZero mode;
    const int n = static_cast<int>(x.shape(0));
    if (static_cast<int>(x.shape(1)) != m.cols) throw std::invalid_argument("x does not fit the matrix");
    std::vector<uint8_t> acts(static_cast<size_t>(m.groups) * n * act_bytes(m.acts()));
    encode_rows(k, m, x.data(), n, acts.data());
    std::vector<float> padded(static_cast<size_t>(n) * m.out_padded());
    k.matmul(m, acts.data(), n, 0, m.blocks, padded.data(), m.out_padded());
    std::vector<float> y(static_cast<size_t>(n) * m.rows);
    for (int t = 0; t < n; ++t)
        std::memcpy(y.data() + static_cast<size_t>(t) * m.rows, padded.data() + static_cast<size_t>(t) * m.out_padded(),
            static_cast<size_t>(m.rows) * 4);
    return numpy(std::move(y), {static_cast<size_t>(n), static_cast<size_t>(m.rows)});
}

F32 dot_pairs(const Ints& a, const Ints& b, const Floats& c, const std::string& isa) {
    const Kernels& k = kernels_for(isa);
    const DenormalsAsZero mode;
    const size_t n = c.shape(0);
    if (a.shape(0) != n || b.shape(0) != n || n % 16 != 0) throw std::invalid_argument("a, b and c must be equally many, by 16");
    std::vector<float> out(n);
    for (size_t i = 0; i < n; i += 16)
        k.dot_pairs(
            reinterpret_cast<const uint32_t*>(a.data()) + i, reinterpret_cast<const uint32_t*>(b.data()) + i, c.data() + i, out.data() + i);
    return numpy(std::move(out), {n});
}

std::unique_ptr<Result> forward(Model& model, const Ints& token, const Ints& row, const Ints& position, const Ints& parent,
    const Ints& starts, const Ints& wanted, const std::vector<int>& hidden_layers, int layers, const std::optional<Bools>& hidden_rows,
    const std::optional<Matrixf>& features) {
    const size_t n = token.shape(0);
    if (row.shape(0) != n || position.shape(0) != n || parent.shape(0) != n || starts.shape(0) < 1)
        throw std::invalid_argument("malformed batch: its arrays differ in length");
    if (hidden_rows && hidden_rows->shape(0) + 1 != starts.shape(0))
        throw std::invalid_argument("malformed batch: hidden_rows has " + std::to_string(hidden_rows->shape(0)) + " rows, the batch " +
                                    std::to_string(starts.shape(0) - 1));
    if (features && (features->shape(0) != n || static_cast<int>(features->shape(1)) != model.hidden()))
        throw std::invalid_argument("malformed batch: features are [" + std::to_string(features->shape(0)) + ", " +
                                    std::to_string(features->shape(1)) + "], but must be [" + std::to_string(n) + ", " +
                                    std::to_string(model.hidden()) + "]");
    if (std::max({n, starts.shape(0), wanted.shape(0)}) > static_cast<size_t>(INT32_MAX))
        throw std::invalid_argument("malformed batch: it has more than 2147483647 tokens");
    const std::vector<int32_t> its_token = copied(token), its_row = copied(row), its_position = copied(position),
                               its_parent = copied(parent), its_starts = copied(starts), its_wanted = copied(wanted);
    std::vector<uint8_t> kept_rows;  // any byte but 0 is true
    if (hidden_rows) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(hidden_rows->data());
        kept_rows.assign(bytes, bytes + hidden_rows->shape(0));
    }
    const BatchView batch{static_cast<int>(n), static_cast<int>(starts.shape(0)) - 1, static_cast<int>(wanted.shape(0)), its_token.data(),
        its_row.data(), its_position.data(), its_parent.data(), its_starts.data(), its_wanted.data(), hidden_layers, layers,
        hidden_rows ? kept_rows.data() : nullptr, features ? features->data() : nullptr};
    return with_lock(model.lock(), [&] { return model.forward(batch); });
}

// What a forward is up against.
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

TupleOf<ListOf<nb::str>, size_t> gguf_strings(const nb::bytearray& data, size_t at, size_t count) {
    const auto* bytes = static_cast<const char*>(data.data());
    const size_t size = data.size();
    nb::list found;
    for (; found.size() < count && at <= size && size - at >= 8;) {
        uint64_t n;
        std::memcpy(&n, bytes + at, 8);
        if (n > size - at - 8) break;
        PyObject* text = PyUnicode_DecodeUTF8(bytes + at + 8, static_cast<Py_ssize_t>(n), nullptr);
        if (!text) throw nb::python_error();
        found.append(nb::steal(text));
        at += 8 + static_cast<size_t>(n);
    }
    return nb::make_tuple(found, at);
}

}  // namespace
}  // namespace outpace

NB_MODULE(_native, m) {
    using namespace outpace;
    m.attr("INTERFACE") = OUTPACE_INTERFACE;
    m.attr("ARITHMETIC") = kArithmetic;
    nb::set_leak_warnings(false);  // a model that lives until the interpreter ends is no leak
    nb::exception<MemoryLimit>(m, "MemoryLimit", PyExc_RuntimeError);
    m.def("usable_isas", &usable_isas);
    m.def("built_isas", &built_isas);
    m.def("left_out_isas", &left_out_isas, "What the compiler could not build, as \"name (what it lacks), ...\"; empty: nothing.");
    m.def("kernels", [](const std::string& isa) { return std::string(kernels_for(isa).name); }, "isa"_a = "");
    m.def("amx",
        []() -> Named {
        nb::dict from;
        for (const auto& [type, tokens] : amx().from) from[type.c_str()] = tokens;
        nb::dict found;
        found["present"] = amx().present;
        found["off"] = amx().off;
        found["from"] = from;
        return found;
    },
        "Intel's tiles: present (the processor has them), off (why they are not used, \"\" where they are), from (file type -> tokens from "
        "which its products use them, 0: never).");
    m.def("dot_pairs", &dot_pairs, "a"_a, "b"_a, "c"_a, "isa"_a,
        "fma(even, even, fma(odd, odd, c)) of pairs of bfloat16, int32 [n], n a multiple of 16; for tests.");
    m.def("differing_product",
        [](const std::string& a, const std::string& b, int spoiled) { return differing_product(kernels_for(a), kernels_for(b), spoiled); },
        "a"_a, "b"_a, "spoiled"_a = 0,
        "The first product of random matrices, of each integer format and 1 to 40 tokens, in which two instruction-set paths differ by a "
        "bit: \"Q4_0 with 3 tokens\"; \"\" where none does. spoiled: products of so many tokens get a wrong bit, for tests.");
    m.def("read_seconds", &read_seconds, "bytes"_a, "threads"_a, "repeats"_a,
        "Seconds that the threads take to read so many bytes of fresh memory once, the best of `repeats`.");
    m.def("row_bytes", &row_bytes, "source"_a, "cols"_a);
    m.def("packed_bytes", [](int source, int64_t rows, int64_t cols, const std::string& target) {
        checked_shape(rows, cols);
        return packed_bytes(source, static_cast<int>(rows), static_cast<int>(cols), target_of(target));
    }, "source"_a, "rows"_a, "cols"_a, "target"_a = "keep");
    m.def("source_types", []() -> nb::typed<nb::dict, int, TupleOf<nb::str, int, int>> {
        nb::dict types;
        for (const SourceType& type : kSources)
            types[nb::int_(static_cast<int>(type.id))] = nb::make_tuple(type.name, type.values, type.bytes);
        return types;
    }, "GGUF's number -> name, values and bytes of a block, of what can be packed.");
    m.def("gguf_strings", &gguf_strings, "data"_a, "at"_a, "count"_a,
        "Up to `count` strings from byte `at` on, as far as they are whole, and where the next one starts.");
    bind_drafting(m);
    bind_policy(m);
    nb::class_<Arena>(m, "Arena", "Memory for packed weights, in large mappings.").def(nb::init<>());
    nb::class_<Matrix>(m, "Matrix", "A packed weight matrix [rows, cols]; see native/weights/matrix.h.")
        .def_ro("rows", &Matrix::rows)
        .def_ro("cols", &Matrix::cols)
        .def_prop_ro("bytes", &Matrix::bytes)
        .def_prop_ro("format", [](const Matrix& x) { return kFormatNames[static_cast<size_t>(x.format)]; })
        .def_prop_ro("packed", &packed, "Its bytes as they lie in memory, uint8 [bytes]; not copied, not to be written to.")
        .def("unpack", &unpack, "float32 [rows, cols], the exact values.")
        .def("row_is", &checked_row, "row"_a, "stored"_a, "source"_a, "target"_a = "keep",
            "Whether a row has the values that packing `stored`, a row of a model's file, would give it.")
        .def("product", &product, "x"_a, "isa"_a = "", "float32 [n, cols] -> [n, rows] by one path's kernels, on one thread.");
    m.def("pack", &pack_bytes, "arena"_a, "data"_a, "source"_a, "rows"_a, "cols"_a, "heads"_a = 0, "target"_a = "keep", "threads"_a = 1);
    nb::class_<PackedFile>(
        m, "PackedFile", "A file of packed weights, mapped read-only; see native/weights/packed_file.h. Raises ValueError, RuntimeError.")
        .def(nb::init<int, size_t>(), "file"_a, "bytes"_a)
        .def_prop_ro("huge", &PackedFile::huge, "The share of it that the system maps in huge pages; 0 where it does not tell.")
        .def("copy", &PackedFile::copy, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Into memory of this process alone, before any matrix is taken from it. Raises MemoryError.")
        .def("checksums", &PackedFile::checksums, "begin"_a, "piece"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Of each `piece` bytes from `begin` on, by so many threads.");
    m.def("checksum", [](const Bytes& data) { return checksum(data.data(), data.size()); }, "data"_a, "64 bits of a file's piece.");
    m.def("mapped_matrix", &mapped_matrix, "file"_a, "offset"_a, "source"_a, "rows"_a, "cols"_a, "target"_a = "keep",
        "What `pack` would make of such a matrix, found in a file. Raises ValueError where it does not lie within it.");
    nb::class_<Model> model(m, "Model");
    bind_runtime(m, model);
    bind_output(m);
    model
        .def("forward", &forward, "token"_a, "row"_a, "position"_a, "parent"_a, "starts"_a, "wanted"_a, "hidden_layers"_a, "layers"_a,
            "hidden_rows"_a.none(), "features"_a.none())
        .def_prop_ro("isa", [](const Model& x) { return x.kernels().name; })
        .def_prop_ro("threads", &Model::threads)
        .def_prop_ro("embedding", [](const Model& x) { return x.weights().embedding; })
        .def_prop_ro("head", [](const Model& x) { return x.weights().head; })
        .def_prop_ro("embedding_scale", [](const Model& x) { return x.weights().config.embedding_scale; },
            "What embeddings are multiplied by when they enter.")
        .def_prop_ro("weight_bytes", [](const Model& x) { return x.weights().bytes(); })
        .def_prop_ro("expert_bytes",
            [](const Model& x) {
        size_t bytes = 0;
        for (const Layer& l : x.weights().layers)
            if (const Experts& e = l.experts; e.count > 0)
                for (const Matrix* m : {&e.gate, &e.up, &e.down})
                    if (m->data) bytes += m->bytes() / static_cast<size_t>(e.count);
        return bytes;
    }, "Of one of a mixture's experts, in all layers.")
        .def("time_phases", [](Model& x, bool on) { with_lock(x.lock(), [&] { x.time_phases(on); }); }, "on"_a)
        .def("take_timings", [](Model& x) { return named(with_lock(x.lock(), [&] { return x.take_timings(); }), kPhaseNames); });
    bind_step_rows(m);
    bind_learned(m);
}
