// What systems, processors and compilers do differently, in one place. Whatever a system lacks has a plain form that is
// merely slower; what cannot be done without is an error here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_MSC_VER) && !defined(__clang__)
#error "cl.exe cannot compile this (it reorders sums, and lacks the GNU builtins): configure with -T ClangCL, or clang-cl"
#endif

namespace outpace {

// Zeroed pages of their own, in huge ones where the system has them. Throws std::bad_alloc.
void* take_pages(size_t bytes);
void give_pages(void* pages, size_t bytes) noexcept;

// Asks for huge pages under `memory`: advice only, without them it is merely slower.
void advise_huge(void* memory, size_t bytes) noexcept;

// Gives back what is in the whole pages within `memory`, which stays mapped: what is read there next is not defined.
void discard_pages(void* memory, size_t bytes) noexcept;

int allowed_processors();  // that this process may use
int current_processor();   // -1: unknown
int current_thread();      // the system's number of the calling thread; 0: unknown

// Keeps a thread off one processor, where the process may use exactly `processors` of them. False: that cannot be done.
bool keep_off(int processor, int processors, const int* threads, size_t count);

// Calls these around every fork of the process, from now on; nothing where processes do not fork.
void at_fork(void (*before)(), void (*in_parent)(), void (*in_child)());

inline void relax() {  // a thread that spins
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(__x86_64__)
// cpuid's registers; all zero for a leaf that the processor does not have.
struct Registers {
    uint32_t a, b, c, d;
};
Registers cpuid(uint32_t leaf, uint32_t subleaf);
uint64_t saved_states();  // the register files that the system saves for threads (XCR0); 0: it does not say
#elif defined(__aarch64__)
// What the system says of the processor; false where it does not say.
struct ArmFeatures {
    bool dot_products, int8_matrices;  // FEAT_DotProd, FEAT_I8MM
};
ArmFeatures arm_features();
#endif

}  // namespace outpace
