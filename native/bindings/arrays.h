// Numpy arrays between Python and what is called in every step. nanobind's own arrays cost about a microsecond each way, and
// a step of one request has a dozen; these cost a tenth.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace outpace {

namespace nb = nanobind;

// Functions and types of numpy, and names of attributes, looked up once. They live as long as the process.
struct Names {
    PyObject *empty, *contiguous, *int32, *float32, *uint8;

    static const Names& get() {
        static const Names names;
        return names;
    }

private:
    Names() {
        const nb::module_ numpy = nb::module_::import_("numpy");
        const auto of = [&](const char* name) { return nb::object(numpy.attr(name)).release().ptr(); };
        empty = of("empty");
        contiguous = of("ascontiguousarray");
        int32 = of("int32");
        float32 = of("float32");
        uint8 = of("uint8");
    }
};

// An object from the C API, or the Python exception that stands in its place.
inline nb::object owned(PyObject* made) {
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

inline long whole(PyObject* number) {
    const long value = PyLong_AsLong(number);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    if (value < INT32_MIN || value > INT32_MAX) throw nb::value_error("a number does not fit int32");
    return value;
}

// int32 values [n] or [b, w] that Python holds; what is no such array is made one first. Other threads may write into them at
// any time, whoever holds the GIL: no bound or index may follow from them. For those there is IntCopy.
class IntView {
public:
    explicit IntView(PyObject* from, int dims = 1) {
        if (!take(from)) {
            PyErr_Clear();
            converted_ = owned(PyObject_CallFunctionObjArgs(Names::get().contiguous, from, Names::get().int32, nullptr));
            if (!take(converted_.ptr())) throw nb::python_error();
        }
        if (view_.ndim != dims) {
            PyBuffer_Release(&view_);
            throw nb::value_error(("an array has " + std::to_string(view_.ndim) + " dimensions, expected " + std::to_string(dims)).c_str());
        }
        if (view_.len / 4 > INT32_MAX) {
            PyBuffer_Release(&view_);
            throw nb::value_error("an array has more than 2147483647 values");
        }
    }
    ~IntView() { PyBuffer_Release(&view_); }
    IntView(const IntView&) = delete;
    IntView& operator=(const IntView&) = delete;

    const int32_t* data() const { return static_cast<const int32_t*>(view_.buf); }
    int size() const { return static_cast<int>(view_.shape[0]); }
    int width() const { return static_cast<int>(view_.shape[1]); }

private:
    bool take(PyObject* from) {
        if (PyObject_GetBuffer(from, &view_, PyBUF_ND | PyBUF_FORMAT) != 0) return false;
        if (view_.itemsize == 4 && (view_.format[0] == 'i' || view_.format[0] == 'l') && !view_.format[1]) return true;
        PyBuffer_Release(&view_);
        return false;
    }
    Py_buffer view_{};
    nb::object converted_;
};

// int32 values [n] or [b, w] as they were at one time: what has been checked stays so.
class IntCopy {
public:
    explicit IntCopy(PyObject* from, int dims = 1) {
        const IntView view(from, dims);
        size_ = view.size();
        width_ = dims > 1 ? view.width() : 1;
        values_.assign(view.data(), view.data() + static_cast<size_t>(size_) * static_cast<size_t>(width_));
    }

    const int32_t* data() const { return values_.data(); }
    int size() const { return size_; }
    int width() const { return width_; }

private:
    std::vector<int32_t> values_;
    int size_ = 0, width_ = 0;
};

// A new numpy array, uninitialised. `data` is valid as long as the array lives.
template <class T>
struct Array {
    nb::object object;
    T* data;

    Array(PyObject* type, std::initializer_list<Py_ssize_t> shape) {
        nb::object sizes = nb::steal(
            shape.size() == 1 ? PyLong_FromSsize_t(*shape.begin()) : PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
        Py_ssize_t at = 0;
        if (shape.size() > 1)
            for (const Py_ssize_t n : shape) PyTuple_SetItem(sizes.ptr(), at++, PyLong_FromSsize_t(n));
        PyObject* arguments[] = {sizes.ptr(), type};
        object = owned(PyObject_Vectorcall(Names::get().empty, arguments, 2, nullptr));
        Py_buffer view;
        if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_WRITABLE) != 0) throw nb::python_error();
        data = static_cast<T*>(view.buf);
        PyBuffer_Release(&view);
    }
};
struct IntArray : Array<int32_t> {
    explicit IntArray(std::initializer_list<Py_ssize_t> shape) : Array(Names::get().int32, shape) {}
};

}  // namespace outpace
