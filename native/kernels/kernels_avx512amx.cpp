#define OUTPACE_AVX512
#define OUTPACE_AMX
#define OUTPACE_NS isa_avx512amx
#include "kernels/matmul_tiles.h"

outpace::TileWidths& outpace::tile_widths() {
    static TileWidths widths{};
    return widths;
}

const outpace::Kernels& outpace::kernels_avx512amx() {
    static const Kernels table = OUTPACE_NS::table<kernels_avx512, tile_widths>("avx512-amx");
    return table;
}
