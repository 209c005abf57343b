#define OUTPACE_NEON
#define OUTPACE_NS isa_neon
#include "kernels/again.h"
#include "kernels/instantiate.h"

namespace outpace {

const Kernels& kernels_neon() {
    static const Kernels table = [] {
        using namespace OUTPACE_NS;
        Kernels t = OUTPACE_NS::table("neon");
        t.matmul = or_again<OUTPACE_NS::matmul, &Kernels::matmul>;
        t.dot_pairs = or_again<dot_pairs_of, &Kernels::dot_pairs>;
        t.attention = or_again<OUTPACE_NS::attention, &Kernels::attention>;
        t.merge_parts = or_again<OUTPACE_NS::merge_parts, &Kernels::merge_parts>;
        t.gate = gate_or_again<OUTPACE_NS::gate>;
        t.rmsnorm = kernels_portable().rmsnorm;
        t.convolve = kernels_portable().convolve;
        t.delta_replay = kernels_portable().delta_replay;
        t.delta_step = kernels_portable().delta_step;
        t.scan_step = kernels_portable().scan_step;
        return t;
    }();
    return table;
}

}  // namespace outpace
