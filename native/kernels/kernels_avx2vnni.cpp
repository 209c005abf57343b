#define OUTPACE_AVX2
#define OUTPACE_NS isa_avx2vnni
#include "kernels/integer_products.h"

namespace outpace {

const Kernels& kernels_avx2vnni() {
    static const Kernels table = [] {
        Kernels t = kernels_avx2();
        t.name = "avx2-vnni";
        t.matmul = OUTPACE_NS::product_of<kernels_avx2>;
        return t;
    }();
    return table;
}

}  // namespace outpace
