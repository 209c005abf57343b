// The 16 lanes of the path that is being compiled.
#pragma once

#if defined(OUTPACE_AVX512)
#include "kernels/simd_avx512.h"
#elif defined(OUTPACE_AVX2)
#include "kernels/simd_avx2.h"
#else
#include "kernels/simd_portable.h"
#endif
