#define OUTPACE_NEON
#define OUTPACE_NS isa_neoni8mm
#include "kernels/again.h"
#include "kernels/integer_products.h"

namespace outpace {

const Kernels& kernels_neoni8mm() {
    static const Kernels table = [] {
        Kernels t = kernels_neon();
        t.name = "neon-i8mm";
        t.matmul = OUTPACE_NS::or_again<OUTPACE_NS::product_of<kernels_neon>, &Kernels::matmul>;
        return t;
    }();
    return table;
}

}  // namespace outpace
