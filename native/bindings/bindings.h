// What the files of bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace outpace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrixf = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bools = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;  // a byte that is neither 0 nor 1 may stand there

// Python's own objects with the type that _native.pyi gives them: nanobind writes it from these types, when the extension is
// built, and what is called in every step reads the objects itself (arrays.h).
template <class T>
using ArrayOf = nb::typed<nb::object, nb::ndarray<nb::numpy, T>>;  // a numpy array
using I32 = ArrayOf<int32_t>;
using F32 = ArrayOf<float>;
using U8 = ArrayOf<uint8_t>;
template <class T>
using ListOf = nb::typed<nb::list, T>;
template <class T>
using SequenceOf = nb::typed<nb::sequence, T>;
template <class... T>
using TupleOf = nb::typed<nb::tuple, T...>;
template <class T>
using TuplesOf = nb::typed<nb::tuple, T, nb::ellipsis>;  // of any length
using Named = nb::typed<nb::dict, nb::str, nb::any>;     // values by name
inline bool is_any(PyObject*) { return true; }

template <class T>
ArrayOf<T> numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T>(owned->data(), shape.size(), shape.begin(), owner));
}

// Another thread may write into an array at any time: what is checked, and then used as a bound or an index, is a copy.
template <class Array>
std::vector<int32_t> copied(const Array& array) {
    return {array.data(), array.data() + array.size()};
}

inline std::vector<float> values_of(const Floats& values) { return {values.data(), values.data() + values.size()}; }
inline std::vector<std::vector<float>> values_of(const std::vector<Floats>& each) {
    std::vector<std::vector<float>> found;
    for (const Floats& values : each) found.push_back(values_of(values));
    return found;
}

// f() while other threads may run Python, and with a lock that only such threads wait for.
template <class F>
auto without_gil(const F& f) {
    nb::gil_scoped_release release;
    return f();
}
template <class F>
auto with_lock(std::mutex& mutex, const F& f) {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex);
    return f();
}
// Seconds by the names of phases.
template <class Seconds>
nb::typed<nb::dict, nb::str, double> named(const Seconds& seconds, const char* const* names) {
    nb::dict found;
    for (const double each : seconds) found[*names++] = each;
    return found;
}

class Model;

void bind_drafting(nb::module_& m);                           // drafting.cpp
void bind_learned(nb::module_& m);                            // learned.cpp
void bind_output(nb::module_& m);                             // output.cpp
void bind_policy(nb::module_& m);                             // policy.cpp
void bind_runtime(nb::module_& m, nb::class_<Model>& model);  // runtime.cpp
void bind_step_rows(nb::module_& m);                          // rows.cpp

}  // namespace outpace
