// The 16 lanes of the path that is being compiled.
#pragma once

#include <utility>

#include "weights/halves.h"

#if defined(OUTPACE_AVX512)
#include "kernels/simd_avx512.h"
#elif defined(OUTPACE_AVX2)
#include "kernels/simd_avx2.h"
#elif defined(OUTPACE_NEON)
#include "kernels/simd_neon.h"
#else
#include "kernels/simd_portable.h"
#endif

namespace outpace {
namespace OUTPACE_NS {

// 0, 1, ..., N - 1 as a type: a loop whose indices are constants, so that what it indexes can live in registers.
template <int... t>
using Pack = std::integer_sequence<int, t...>;
template <int N>
using Range = std::make_integer_sequence<int, N>;

INLINE F zero() { return set1(0.0f); }
INLINE I zero_i() { return set1_i(0); }
// Pairs of bf16 in 32-bit lanes: the first of each pair is the low half.
INLINE I load_pairs(const void* p) { return load_i(static_cast<const uint32_t*>(p)); }
INLINE I set1_pair(const void* p) { return set1_i(int_at(p)); }
#ifdef __AVX512BF16__
constexpr bool kDotPairs = true;  // whether dot_pairs is one instruction
INLINE F dot_pairs(I a, I b, F c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
constexpr bool kDotPairs = false;
INLINE F dot_pairs(I a, I b, F c) { return fma(pair_low(a), pair_low(b), fma(pair_high(a), pair_high(b), c)); }
#endif

}  // namespace OUTPACE_NS
}  // namespace outpace
