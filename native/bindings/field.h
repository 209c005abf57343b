// Arrays of Python as they were at one time.
#pragma once

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings/bindings.h"

namespace outpace {

// A C-contiguous array of `Item` as it was at one time, or none: what has been checked stays so, whoever writes into it.
template <class Item>
class Field {
public:
    Field(nb::handle from, const char* name) {
        if (from.is_none()) return;
        Py_buffer view;
        const char* type = std::is_floating_point_v<Item> ? "float32" : sizeof(Item) == 1 ? "uint8" : "int32";
        const std::string wrong = std::string(name) + " must be a contiguous numpy array of " + type;
        if (PyObject_GetBuffer(from.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
            if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError) &&
                !PyErr_ExceptionMatches(PyExc_BufferError))
                throw nb::python_error();
            PyErr_Clear();
            throw std::invalid_argument(wrong);
        }
        const char kind = view.format && view.format[0] ? view.format[std::strlen(view.format) - 1] : 'B';
        const bool fits = std::is_floating_point_v<Item> ? kind == 'f' : std::strchr(sizeof(Item) == 1 ? "Bb?" : "il", kind) != nullptr;
        held_ = view.itemsize == static_cast<Py_ssize_t>(sizeof(Item)) && fits;
        if (held_) {
            shape_.assign(view.shape, view.shape + view.ndim);
            values_.resize(static_cast<size_t>(view.len) / sizeof(Item));
            if (view.len > 0) std::memcpy(values_.data(), view.buf, static_cast<size_t>(view.len));
        }
        PyBuffer_Release(&view);
        if (!held_) throw std::invalid_argument(wrong);
    }

    bool held() const { return held_; }
    const Item* data() const { return held_ ? values_.data() : nullptr; }
    // Throws unless the shape is [rows] or [rows, width].
    void expect(size_t rows, std::optional<size_t> width, const char* name) const {
        if (!held_) return;
        const bool fits = shape_.size() == (width ? 2 : 1) && shape(0) == rows && (!width || shape(1) == *width);
        if (!fits) throw std::invalid_argument(std::string(name) + " has another shape than the step's rows");
    }
    size_t shape(size_t axis) const { return axis < shape_.size() ? static_cast<size_t>(shape_[axis]) : 0; }

private:
    std::vector<Item> values_;
    std::vector<Py_ssize_t> shape_;
    bool held_ = false;
};

}  // namespace outpace
