#define OUTPACE_AVX512
#define OUTPACE_NS isa_avx512amx_emulated
#include "kernels/matmul_tiles.h"

OUTPACE_TILE_TABLE(kernels_avx512amxemulated, emulated_tile_widths, kernels_avx512, "avx512-amx-emulated")
