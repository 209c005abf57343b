// Whether this process may use Intel's tiles (AMX), and from how many tokens they pay.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace outpace {

struct Kernels;

struct Amx {
    bool present = false;                           // the processor has them
    std::string off;                                // why they are not used; empty: they are
    std::vector<std::pair<std::string, int>> from;  // file type -> tokens from which its products use them; 0: never
};

// Found out once a process, in a few milliseconds: the system is asked for permission, products of every integer format are
// compared with the other kernels' bit for bit, then both are timed. Threads and forked children inherit all of it.
const Amx& amx();

// The first product of random matrices, of each integer format and 1 to 40 tokens, of which two tables differ in a bit:
// "Q4_0 with 3 tokens", say. Empty: none does. `spoiled`, for tests: products of so many tokens get a wrong bit.
std::string differing_product(const Kernels& a, const Kernels& b, int spoiled = 0);

}  // namespace outpace
