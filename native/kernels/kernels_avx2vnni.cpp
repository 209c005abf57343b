// avx2, but for dot products of bytes: only the products of integer formats are compiled again.
#define OUTPACE_AVX2
#define OUTPACE_NS isa_avx2vnni
#include "kernels/matmul.h"

namespace outpace {
namespace OUTPACE_NS {

static void product_of(const Matrix& m, const uint8_t* acts, int n, int begin, int end, float* y, int64_t ldy) {
    with_format(Formats{}, m.format, [&](auto format) {
        if constexpr (layout_of(format.value).acts == Acts::I8)
            product<format.value>(m, acts, n, begin, end, y, ldy);
        else
            kernels_avx2().matmul(m, acts, n, begin, end, y, ldy);
    });
}

}  // namespace OUTPACE_NS

const Kernels& kernels_avx2vnni() {
    static const Kernels table = [] {
        Kernels t = kernels_avx2();
        t.name = "avx2-vnni";
        t.matmul = OUTPACE_NS::product_of;
        return t;
    }();
    return table;
}

}  // namespace outpace
