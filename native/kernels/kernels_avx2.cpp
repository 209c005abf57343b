#define OUTPACE_AVX2
#define OUTPACE_NS isa_avx2
#include "kernels/instantiate.h"

const outpace::Kernels& outpace::kernels_avx2() {
    static const Kernels table = OUTPACE_NS::table("avx2");
    return table;
}
