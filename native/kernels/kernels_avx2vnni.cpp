#define OUTPACE_AVX2
#define OUTPACE_NS isa_avx2vnni
#include "kernels/instantiate.h"

OUTPACE_TABLE(kernels_avx2vnni, "avx2-vnni")
