#define OUTPACE_AVX512
#define OUTPACE_NS isa_avx512bf16
#include "kernels/instantiate.h"

OUTPACE_TABLE(kernels_avx512bf16, "avx512-bf16")
