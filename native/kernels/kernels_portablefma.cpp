// portable, compiled for processors with fused multiply-adds: the same bits, without the detour by float64.
#define OUTPACE_PORTABLE
#define OUTPACE_NS isa_portablefma
#include "kernels/instantiate.h"

const outpace::Kernels& outpace::kernels_portablefma() {
    static const Kernels table = OUTPACE_NS::table("portable");
    return table;
}
