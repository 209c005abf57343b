// A path that differs from another in its dot products of bytes: only the products of integer formats are compiled again.
#pragma once

#include "kernels/matmul.h"

namespace outpace {
namespace OUTPACE_NS {

template <const Kernels& (*base)()>
static void product_of(const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
    with_format(Formats{}, m.format, [&](auto format) {
        if constexpr (layout_of(format.value).acts == Acts::I8)
            product<format.value>(m, acts, n, begin, end, y, ldy);
        else
            base().matmul(m, acts, n, begin, end, y, ldy);
    });
}

}  // namespace OUTPACE_NS
}  // namespace outpace
