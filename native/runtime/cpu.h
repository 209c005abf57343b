// What this machine can do, and which kernel table to use for it.
#pragma once

#include <string>
#include <vector>

namespace outpace {

struct Kernels;

// Read from the processor itself: what a compiler's query knows depends on the compiler. A path's ability includes that the system
// saves its registers; `amx` (tiles of int8) takes permission, too: see amx.h. `avx512bf16` includes that its instruction computes
// as the rule says (Kernels::dot_pairs), on some thousand random triples. `fast_pairs`: that it beats two multiply-adds, which on
// Intel's it does not: they start two of those a cycle and this one every second cycle (measured on family 6 model 207).
struct Abilities {
    bool avx2 = false, avx2vnni = false, avx512 = false, avx512bf16 = false, amx = false, neon = false, neoni8mm = false;
    bool fast_pairs = false;

    Abilities();
};
const Abilities& abilities();

// Kernel tables this build has, best first; and those that its compiler could not build, as "name (what it lacks), ...".
std::vector<std::string> built_isas();
std::string left_out_isas();

// Kernel tables this machine can run, best first: "avx512-amx", "avx512-bf16" (behind the next without `fast_pairs`), "avx512",
// "avx2-vnni", "avx2", or "neon-i8mm", "neon"; then "portable".
std::vector<std::string> usable_isas();

// The table for `name`; "" or "auto" takes the best.
// Throws std::invalid_argument when the name is unknown or this machine lacks it.
const Kernels& kernels_for(const std::string& name);

}  // namespace outpace
