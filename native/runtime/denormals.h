// Numbers below 2^-126, denormals, count as zero in every kernel: as operands and as results. That is what instructions for
// pairs of bfloat16 do whatever a thread's mode is, and it spares others a hundred cycles a denormal.
#pragma once

#include <cmath>
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

// What rounds up to 2^-126 from below is 2^-126 on x86, which calls a result tiny by what it rounds to. ARM calls it tiny before
// it rounds, and makes it 0. Sums whose result is tiny are exact, so this concerns products, quotients and fused multiply-adds.
// There these give x86's result: the same operation 2^60 times as large, where nothing is tiny, shows which results they are.
// A factor of 2^30 or 2^60 overflows only where the result is far from 2^-126: infinity and NaN change nothing.
#if defined(__aarch64__)
static inline float kept(float result, float larger) { return std::fabs(larger) == 0x1p-66f ? larger * 0x1p-60f : result; }
static inline float times(float a, float b) { return kept(a * b, (a * 0x1p30f) * (b * 0x1p30f)); }
static inline float over(float a, float b) { return kept(a / b, a * 0x1p60f / b); }
static inline float fused(float a, float b, float c) {
    return kept(__builtin_fmaf(a, b, c), __builtin_fmaf(a * 0x1p30f, b * 0x1p30f, c * 0x1p60f));
}
// Whether a result became zero for being tiny since the object was made: this thread's flag UFC.
class Underflows {
public:
    Underflows() { __asm__ volatile("msr fpsr, %0" : : "r"(flags() & ~kFlag) : "memory"); }
    bool any() const { return flags() & kFlag; }

private:
    static constexpr uint64_t kFlag = 8;
    static uint64_t flags() {
        uint64_t flags;
        __asm__ volatile("mrs %0, fpsr" : "=r"(flags) : : "memory");
        return flags;
    }
};
#else
static inline float times(float a, float b) { return a * b; }
static inline float over(float a, float b) { return a / b; }
static inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

}  // namespace outpace
