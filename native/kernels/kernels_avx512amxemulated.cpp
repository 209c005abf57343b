#define OUTPACE_AVX512
#define OUTPACE_NS isa_avx512amx_emulated
#include "kernels/matmul_tiles.h"

outpace::TileWidths& outpace::emulated_tile_widths() {
    static TileWidths widths{};
    return widths;
}

const outpace::Kernels& outpace::kernels_avx512amxemulated() {
    static const Kernels table = OUTPACE_NS::table<kernels_avx512, emulated_tile_widths>("avx512-amx-emulated");
    return table;
}
