#include "runtime/cpu.h"

#include <stdexcept>

#include "kernels/table.h"

namespace outpace {
namespace {

struct Candidate {
    const char* name;
    const char* family;
    const Kernels& (*table)();
    bool usable;
};

std::vector<Candidate> candidates() {
    std::vector<Candidate> all;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    all.push_back({"avx512-bf16", "avx512", kernels_avx512bf16, avx512 && __builtin_cpu_supports("avx512bf16")});
    all.push_back({"avx512", "avx512", kernels_avx512, avx512});
    all.push_back({"avx2-vnni", "avx2", kernels_avx2vnni, avx2 && __builtin_cpu_supports("avxvnni")});
    all.push_back({"avx2", "avx2", kernels_avx2, avx2});
#endif
    all.push_back({"portable", "portable", kernels_portable, true});
    return all;
}

}  // namespace

std::vector<std::string> usable_isas() {
    std::vector<std::string> names;
    for (const Candidate& c : candidates())
        if (c.usable) names.emplace_back(c.name);
    return names;
}

const Kernels& kernels_for(const std::string& name) {
    bool known = name.empty() || name == "auto";
    for (const Candidate& c : candidates()) {
        const bool asked = name.empty() || name == "auto" || name == c.name || name == c.family;
        known = known || asked;
        if (asked && c.usable) return c.table();
    }
    std::string have;
    for (const std::string& usable : usable_isas()) have += (have.empty() ? "" : ", ") + usable;
    throw std::invalid_argument("instruction set '" + name + "' " +
                                (known ? "is not available on this machine" : "is unknown") + ": use one of " + have);
}

}  // namespace outpace
