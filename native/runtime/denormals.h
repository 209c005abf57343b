// Numbers below 2^-126, denormals, count as zero in every kernel: as operands and as results. That is what instructions for
// pairs of bfloat16 do whatever a thread's mode is, and it spares others a hundred cycles a denormal.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace outpace {

// While one lives, its thread computes so. The mode that it found is put back: it is the caller's.
class DenormalsAsZero {
public:
    DenormalsAsZero() : found_(mode()) { set_mode(found_ | kFlush); }
    ~DenormalsAsZero() { set_mode(found_); }
    DenormalsAsZero(const DenormalsAsZero&) = delete;
    DenormalsAsZero& operator=(const DenormalsAsZero&) = delete;

private:
#if defined(__x86_64__)
    static constexpr uint64_t kFlush = 0x8040;  // results (FTZ), operands (DAZ)
    static uint64_t mode() { return _mm_getcsr(); }
    static void set_mode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
    static constexpr uint64_t kFlush = uint64_t{1} << 24;  // both (FZ)
    static uint64_t mode() {
        uint64_t mode;
        __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else  // a processor without such a mode: only numbers as small as these can differ there
    static constexpr uint64_t kFlush = 0;
    static uint64_t mode() { return 0; }
    static void set_mode(uint64_t) {}
#endif

    const uint64_t found_;
};

}  // namespace outpace
