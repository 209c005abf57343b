// The 16 lanes of the path that is being compiled.
#pragma once

#if defined(OUTPACE_AVX512)
#include "simd_avx512.h"
#elif defined(OUTPACE_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif
