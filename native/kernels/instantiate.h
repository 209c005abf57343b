// One instruction-set path's table. A kernels_*.cpp defines OUTPACE_NS, then includes this.
#pragma once

#include "kernels/attention.h"
#include "kernels/delta.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "kernels/sampling.h"
#include "kernels/store_kv.h"

namespace outpace {
namespace OUTPACE_NS {

static Kernels table(const char* name) {
    Kernels k{};
    k.name = name;
    k.matmul = matmul;
    k.dot_pairs = dot_pairs_of;
    k.encode = encode;
    k.rmsnorm = rmsnorm;
    k.add = add_to;
    k.rotate = rotate;
    k.gate = gate;
    k.cap = cap;
    k.attention = attention;
    k.merge_parts = merge_parts;
    k.convolve = convolve;
    k.delta_replay = delta_replay;
    k.delta_step = delta_step;
    k.scan_step = scan_step;
    k.put_key = put_key;
    k.put_value = put_value;
    k.argmax = argmax;
    k.at_least = at_least;
    k.weigh = weigh;
    k.gumbel_survivors = gumbel_survivors;
    k.gumbel_survivors_of = gumbel_survivors_of;
    return k;
}

}  // namespace OUTPACE_NS
}  // namespace outpace
