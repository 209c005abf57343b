#include "runtime/cpu.h"

#include <cstring>
#include <initializer_list>
#include <random>
#include <stdexcept>

#include "kernels/table.h"
#include "platform.h"
#include "runtime/amx.h"
#include "runtime/denormals.h"
#include "weights/halves.h"

namespace outpace {
namespace {

struct Candidate {
    const char* name;
    const Kernels& (*table)();
    bool usable;
    bool listed = true;  // else for tests, which name it
};

// The paths that were built, best first, and whether this machine can run them.
std::vector<Candidate> candidates() {
    const Abilities& machine = abilities();
    std::vector<Candidate> all;
#if defined(OUTPACE_HAS_AVX512AMX)
    all.push_back({"avx512-amx", kernels_avx512amx, amx().off.empty()});
#endif
#if defined(OUTPACE_HAS_AVX512)
    all.push_back({"avx512", kernels_avx512, machine.avx512});
#endif
#if defined(OUTPACE_HAS_AVX512BF16)
    const Candidate pairs{"avx512-bf16", kernels_avx512bf16, machine.avx512bf16};
    all.insert(all.end() - (machine.fast_pairs ? 1 : 0), pairs);
#endif
#if defined(OUTPACE_HAS_AVX512AMXEMULATED)
    all.push_back({"avx512-amx-emulated", kernels_avx512amxemulated, machine.avx512, false});
#endif
#if defined(OUTPACE_HAS_AVX2VNNI)
    all.push_back({"avx2-vnni", kernels_avx2vnni, machine.avx2vnni});
#endif
#if defined(OUTPACE_HAS_AVX2)
    all.push_back({"avx2", kernels_avx2, machine.avx2});
#endif
#if defined(OUTPACE_HAS_NEONI8MM)
    all.push_back({"neon-i8mm", kernels_neoni8mm, machine.neoni8mm});
#endif
#if defined(OUTPACE_HAS_NEON)
    all.push_back({"neon", kernels_neon, machine.neon});
#endif
#if defined(OUTPACE_HAS_PORTABLEFMA)
    all.push_back({"portable", machine.avx2 ? kernels_portablefma : kernels_portable, true});
#elif defined(OUTPACE_HAS_PORTABLE)
    all.push_back({"portable", kernels_portable, true});
#endif
    return all;
}

#if defined(OUTPACE_HAS_AVX512BF16)
// Whether two tables' dot_pairs agree on random triples: numbers of any size, and sums that nearly cancel.
bool same_pairs(const Kernels& a, const Kernels& b) {
    const DenormalsAsZero mode;
    std::mt19937 random(1);
    for (int round = 0; round < 512; ++round) {
        uint32_t x[16], y[16];
        float sums[16], by_a[16], by_b[16];
        for (int i = 0; i < 16; ++i) {
            x[i] = static_cast<uint32_t>(random()) & 0xBFFFBFFF;  // below 2, so that all is finite
            y[i] = static_cast<uint32_t>(random()) & 0xBFFFBFFF;
            const float product = bits_to_float(x[i] << 16) * bits_to_float(y[i] << 16);
            sums[i] = i % 2 ? -product : bits_to_float(static_cast<uint32_t>(random()) & 0xBFFFFFFF);
        }
        a.dot_pairs(x, y, sums, by_a);
        b.dot_pairs(x, y, sums, by_b);
        if (std::memcmp(by_a, by_b, sizeof by_a) != 0) return false;
    }
    return true;
}
#endif

}  // namespace

Abilities::Abilities() {
#if defined(__x86_64__)
    const auto has = [](uint32_t word, std::initializer_list<int> bits) {
        for (const int bit : bits)
            if (!(word >> bit & 1)) return false;
        return true;
    };
    constexpr uint64_t avx_state = 0x6, avx512_state = 0xE6;
    const uint64_t saved = saved_states();
    const Registers first = cpuid(1, 0), seventh = cpuid(7, 0);
    const Registers more = seventh.a >= 1 ? cpuid(7, 1) : Registers{0, 0, 0, 0};
    avx2 = (saved & avx_state) == avx_state && has(first.c, {12, 28, 29}) && has(seventh.b, {5});  // FMA, AVX, F16C; AVX2
    avx2vnni = avx2 && has(more.a, {4});
    avx512 = avx2 && (saved & avx512_state) == avx512_state && has(seventh.b, {16, 17, 30, 31}) &&  // F, DQ, BW, VL
             has(seventh.c, {11});                                                                  // VNNI
#if defined(OUTPACE_HAS_AVX512BF16)
    avx512bf16 = avx512 && has(more.a, {5}) && same_pairs(kernels_avx512bf16(), kernels_avx512());
#endif
    fast_pairs = cpuid(0, 0).b != 0x756E6547;  // "Genu", of GenuineIntel
    amx = has(seventh.d, {24, 25});            // TILE, INT8
#elif defined(__aarch64__)
    const ArmFeatures found = arm_features();
    neon = found.dot_products;
    neoni8mm = neon && found.int8_matrices;
#endif
}

const Abilities& abilities() {
    static const Abilities machine;
    return machine;
}

std::vector<std::string> built_isas() {
    std::vector<std::string> names;
    for (const Candidate& c : candidates())
        if (c.listed) names.emplace_back(c.name);
    return names;
}

std::string left_out_isas() { return OUTPACE_LEFT_OUT; }

std::vector<std::string> usable_isas() {
    std::vector<std::string> names;
    for (const Candidate& c : candidates())
        if (c.usable && c.listed) names.emplace_back(c.name);
    return names;
}

const Kernels& kernels_for(const std::string& name) {
    const bool any = name.empty() || name == "auto";
    bool known = any;
    for (const Candidate& c : candidates()) {
        const bool asked = name == c.name || (any && c.listed);
        known = known || asked;
        if (asked && c.usable) return c.table();
    }
    if (name == "avx512-amx") throw std::invalid_argument("instruction set 'avx512-amx' is not in use: " + amx().off);
    std::string have;
    if (usable_isas().empty())
        throw std::invalid_argument("this build is for another machine (left out: " OUTPACE_LEFT_OUT "): build it again here");
    for (const std::string& usable : usable_isas()) have += (have.empty() ? "" : ", ") + usable;
    const std::string left_out = OUTPACE_LEFT_OUT;
    const bool lost = !known && left_out.find(name + " (") != std::string::npos;
    throw std::invalid_argument("instruction set '" + name + "' " +
                                (known     ? "is not available on this machine"
                                    : lost ? "was left out of this build: " + left_out + "; build it again,"
                                           : "is unknown") +
                                (lost ? " or use one of " : ": use one of ") + have);
}

}  // namespace outpace
