#define OUTPACE_PORTABLE
#define OUTPACE_NS isa_portable
#include "kernels/instantiate.h"

const outpace::Kernels& outpace::kernels_portable() {
    static const Kernels table = OUTPACE_NS::table("portable");
    return table;
}
