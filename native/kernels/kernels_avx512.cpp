#define OUTPACE_AVX512
#define OUTPACE_NS isa_avx512
#include "kernels/instantiate.h"

const outpace::Kernels& outpace::kernels_avx512() {
    static const Kernels table = OUTPACE_NS::table("avx512");
    return table;
}
