// One instruction-set path's table. A kernels_*.cpp defines OUTPACE_NS and its name, then includes this.
#pragma once

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "kernels/sampling.h"
#include "kernels/store_kv.h"

#define OUTPACE_TABLE(function, label)                                                             \
    namespace outpace {                                                                            \
    const Kernels& function() {                                                                    \
        namespace path = OUTPACE_NS;                                                               \
        static const Kernels table{label,       path::matmul,  path::encode,    path::rmsnorm,     \
                                   path::add_to, path::rotate, path::gate,      path::attention, path::merge_parts, path::put_key,     \
                                   path::put_value, path::argmax, path::at_least,  path::weigh,     path::gumbel_survivors, path::gumbel_survivors_of};      \
        return table;                                                                              \
    }                                                                                              \
    }
