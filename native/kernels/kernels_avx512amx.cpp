#define OUTPACE_AVX512
#define OUTPACE_AMX
#define OUTPACE_NS isa_avx512amx
#include "kernels/matmul_tiles.h"

OUTPACE_TILE_TABLE(kernels_avx512amx, tile_widths, kernels_avx512bf16, "avx512-amx")
