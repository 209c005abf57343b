// Functions of float64 from basic operations, each correctly rounded and none contracted: a library's last bit differs from
// system to system, and with what the processor has. `static`, as in halves.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace outpace {

constexpr double kRoundAt = 6755399441055744.0;  // 1.5 * 2^52: adding and taking it away rounds to an integer, ties to even

// e^x to within a few units in the last place; 0 below e^-700 and for NaN, at most e^700.
static inline double exponential(double x) {
    constexpr double log2e = 1.4426950408889634, high = 6.93147180369123816490e-01, low = 1.90821492927058770002e-10;
    const double least = x > -700.0 ? x : -700.0, v = least < 700.0 ? least : 700.0;
    const double shifted = v * log2e + kRoundAt, k = shifted - kRoundAt;
    const double r = (v - k * high) - k * low;
    double p = 1.0 / 6227020800.0;  // Taylor to the 13th term: |r| <= 0.35
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    std::memcpy(&bits, &shifted, 8);  // k stands in its lowest bits: no path has to convert it
    bits = (bits + 1023) << 52;
    double scale;
    std::memcpy(&scale, &bits, 8);
    return x > -700.0 ? p * scale : 0.0;
}

static inline double logistic(double x) { return 1.0 / (1.0 + exponential(-x)); }

// x >= 0 as float32; 0 for what is far below anything that counts, since processors round tiny numbers in different ways.
static inline float narrowed(double x) { return x < 1e-30 ? 0.0f : static_cast<float>(x); }

// log x of a positive normal number: noise.py's, the same operations in the same order.
static inline double natural_log(double x) {
    int exponent;
    double m = std::frexp(x, &exponent);
    if (m < 0x1.6a09e667f3bcdp-1) {
        m = m + m;
        --exponent;
    }
    const double k = static_cast<double>(exponent), f = m - 1.0, s = f / (2.0 + f), z = s * s;
    double tail = 2.0 / 21.0;
    for (int i = 8; i >= 0; --i) tail = tail * z + 2.0 / (2 * i + 3);
    return k * 6.93147180369123816490e-01 + (f - (s * (f - z * tail) - k * 1.90821492927058770002e-10));
}

// cos and sin of |x| <= 2^20 to an error of about 2^-53: x less the nearest multiple of pi / 2, whose first 33 bits times that
// multiple are exact, then Taylor's series.
static inline void circle(double x, double* cosine, double* sine) {
    constexpr double half_pi = 0x1.921fb544p+0, rest_of_it = 0x1.0b4611a626331p-34;
    const double k = (x * 0x1.45f306dc9c883p-1 + kRoundAt) - kRoundAt;
    const double r = (x - k * half_pi) - k * rest_of_it, z = r * r;
    double c = 0.0, s = 0.0;
    for (const double n : {18.0, 16.0, 14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0}) {
        const double step = z / (n * (n - 1.0) * (n + 1.0));
        c = (1.0 - c) * (step * (n + 1.0));
        s = (1.0 - s) * (step * (n - 1.0));
    }
    const double a = 1.0 - c, b = r - r * s;
    const int64_t quarter = static_cast<int64_t>(k) & 3;
    *cosine = quarter == 0 ? a : quarter == 1 ? -b : quarter == 2 ? -a : b;
    *sine = quarter == 0 ? b : quarter == 1 ? a : quarter == 2 ? -b : -a;
}

}  // namespace outpace
