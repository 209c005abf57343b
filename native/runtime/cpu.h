// What this machine can do, and which kernel table to use for it.
#pragma once

#include <string>
#include <vector>

namespace outpace {

struct Kernels;

// Kernel tables this build has, best first; and those that its compiler could not build, as "name (what it lacks), ...".
std::vector<std::string> built_isas();
std::string left_out_isas();

// Kernel tables this machine can run, best first: "avx512-bf16", "avx512", "avx2-vnni", "avx2", "portable".
std::vector<std::string> usable_isas();

// The table for `name`; "" or "auto" takes the best, a family name ("avx512", "avx2") the best of its family.
// Throws std::invalid_argument when the name is unknown or this machine lacks it.
const Kernels& kernels_for(const std::string& name);

}  // namespace outpace
