#define OUTPACE_AVX512
#define OUTPACE_NS isa_avx512
#include "kernels/instantiate.h"

OUTPACE_TABLE(kernels_avx512, "avx512")
