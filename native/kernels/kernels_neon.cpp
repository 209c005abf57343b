#define OUTPACE_NEON
#define OUTPACE_NS isa_neon
#include "kernels/instantiate.h"

const outpace::Kernels& outpace::kernels_neon() {
    static const Kernels table = OUTPACE_NS::table("neon");
    return table;
}
