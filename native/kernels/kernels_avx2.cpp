#define OUTPACE_AVX2
#define OUTPACE_NS isa_avx2
#include "kernels/instantiate.h"

OUTPACE_TABLE(kernels_avx2, "avx2")
