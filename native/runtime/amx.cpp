#include "runtime/amx.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <random>

#include "kernels/table.h"
#include "platform.h"
#include "runtime/cpu.h"
#include "runtime/denormals.h"
#include "runtime/scratch.h"
#include "weights/pack.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outpace {
namespace {

constexpr int kWidths[] = {1, 2, 3, 4, 6, 8, 12, 16};  // at which both kernels are timed
constexpr int kTrials = 7;

// A matrix of random values and moderate scales, 64 rows by 512 inputs.
Matrix random_matrix(Arena& arena, Format format, std::mt19937& random) {
    const Layout at = layout_of(format);
    uint8_t* bytes;
    const Matrix m = arena.matrix(format, 64, 512, bytes);
    for (size_t i = 0; i < m.bytes(); ++i) bytes[i] = static_cast<uint8_t>(random());
    const auto halves = [&](uint8_t* to) {  // float16 of 0.0078 to 0.0156
        for (int lane = 0; lane < kRows; ++lane) {
            const auto half = static_cast<uint16_t>(0x2000 + random() % 0x400);
            std::memcpy(to + 2 * lane, &half, 2);
        }
    };
    for (uint8_t* s = bytes; s < bytes + m.bytes(); s += at.bytes) {
        if (at.d >= 0) {
            halves(s + at.d);
            if (at.dmin >= 0) halves(s + at.dmin);
            continue;
        }
        for (int g = 0; g < at.groups; ++g) {
            halves(s + at.scale_of(g));
            if (at.second >= 0) halves(s + at.second_of(g));
        }
    }
    return m;
}

std::vector<uint8_t> random_acts(const Kernels& k, const Matrix& m, int n, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<uint8_t> acts(static_cast<size_t>(m.groups) * static_cast<size_t>(n * act_bytes(m.acts())));
    std::vector<float> values(static_cast<size_t>(n) * static_cast<size_t>(m.cols));
    for (float& x : values) x = normal(random);
    encode_rows(k, m, values.data(), n, acts.data());
    return acts;
}

template <class Visit>  // visit(type, matrix) of each file type that is kept in integers; true ends it
void each_integer_type(const Visit& visit) {
    Arena arena;
    std::mt19937 random(1);
    for (const SourceType& type : kSources)
        if (layout_of(type.kept).acts == Acts::I8 && visit(type, random_matrix(arena, type.kept, random), random)) return;
}

#if defined(OUTPACE_HAS_AVX512AMX)
// Tiles are state that the system must save when it changes threads: it does once it was asked to.
std::string permission() {
    constexpr uint64_t tile_states = 0x60000;
    if ((saved_states() & tile_states) != tile_states) return "the system does not save them; Linux does from 5.16 on";
#if defined(__linux__)
    constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h, which older systems lack
    if (syscall(SYS_arch_prctl, ask, tile_data) == 0) return "";
    if (errno == ENOSPC) return "a thread's alternate signal stack is too small for them (faulthandler's, say)";
    return std::string("the system refuses permission (arch_prctl: ") + std::strerror(errno) + "); Linux grants it from 5.16 on";
#else
    return "only Linux is asked for permission";
#endif
}

double best_seconds(MatmulKernel matmul, const Matrix& m, const uint8_t* acts, int n, float* y) {
    using Clock = std::chrono::steady_clock;
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < kTrials; ++i) {
        const auto start = Clock::now();
        matmul(m, acts, n, 0, m.blocks, y, m.out_padded());
        best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
    }
    return best;
}

// The least width from which tiles were faster at every width that was tried; 0: at none.
int paying_width(const Kernels& tiles, const Kernels& other, const Matrix& m, std::mt19937& random) {
    int from = 0;
    std::vector<float> y(static_cast<size_t>(16 * m.out_padded()));
    for (const int n : kWidths) {
        const std::vector<uint8_t> acts = random_acts(other, m, n, random);
        const bool pays = best_seconds(tiles.matmul, m, acts.data(), n, y.data()) < best_seconds(other.matmul, m, acts.data(), n, y.data());
        from = !pays ? 0 : from ? from : n;
    }
    return from;
}

Amx find_out() {
    Amx found;
    found.present = abilities().amx;
    if (!found.present)
        found.off = "this processor has none";
    else if (!abilities().avx512)
        found.off = "this processor lacks AVX-512 with VNNI, which the path needs beside it";
    else
        found.off = permission();
    if (!found.off.empty()) return found;
    const Kernels &tiles = kernels_avx512amx(), &other = kernels_avx512();
    const std::string differs = differing_product(tiles, other);
    if (!differs.empty()) {
        found.off = "it failed its check: a product of " + differs + " is not what the other kernels say. Please report this";
        return found;
    }
    TileWidths widths{};
    each_integer_type([&](const SourceType& type, const Matrix& m, std::mt19937& random) {
        int& from = widths.from[static_cast<int>(type.kept)];
        if (from == 0) {
            const int paying = paying_width(tiles, other, m, random);
            from = paying > 0 ? paying : std::numeric_limits<int>::max();
        }
        found.from.emplace_back(type.name, from < std::numeric_limits<int>::max() ? from : 0);
        return false;
    });
    tile_widths() = widths;
    return found;
}
#else
Amx find_out() {
    Amx found;
#if defined(__x86_64__)
    found.off = "this build has no path for it (GCC 11 and Clang 12 can make it)";
#else
    found.off = "this processor has none";
#endif
    return found;
}
#endif

}  // namespace

const Amx& amx() {
    static const Amx found = find_out();
    return found;
}

std::string differing_product(const Kernels& a, const Kernels& b, int spoiled) {
    const DenormalsAsZero mode;
    std::string differs;
    each_integer_type([&](const SourceType& type, const Matrix& m, std::mt19937& random) {
        for (const int n : {1, 2, 3, 5, 8, 15, 16, 17, 21, 32, 33, 40}) {
            const std::vector<uint8_t> acts = random_acts(a, m, n, random);
            std::vector<float> x(static_cast<size_t>(n * m.out_padded())), y(x.size());
            a.matmul(m, acts.data(), n, 0, m.blocks, x.data(), m.out_padded());
            b.matmul(m, acts.data(), n, 0, m.blocks, y.data(), m.out_padded());
            if (n == spoiled) y.back() = -y.back();
            if (std::memcmp(x.data(), y.data(), x.size() * 4) == 0) continue;
            differs = std::string(type.name) + " with " + std::to_string(n) + (n == 1 ? " token" : " tokens");
            return true;
        }
        return false;
    });
    return differs;
}

}  // namespace outpace
