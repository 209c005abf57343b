// Convolutions over the slots of a drafter's block (DFlash2).
#include "model/run.h"

namespace outpace {

// x -> normed and kept, since later slots read it, and encoded for the product that makes kernels.
void Model::Run::encode_kept(const Seat& me, int t, const std::vector<float>& norm, const LocalConv& conv) {
    float *kept = s_.convolved.get() + static_cast<size_t>(t) * static_cast<size_t>(c_.hidden),
          *line = s_.line[static_cast<size_t>(me.id)].get();
    k_.rmsnorm(x(me, t), norm.data(), c_.eps, c_.hidden, kept);
    std::memcpy(line, kept, static_cast<size_t>(c_.hidden) * 4);
    encode_line(me, c_.hidden, n_, t, {&conv.project});
}

// Token t's row of `rows`, convolved, in the thread's line. `side`: 0 of what enters, 1 of what leaves.
const float* Model::Run::convolved(const Seat& me, int t, const LocalConv& conv, int side, const float* rows, int stride) const {
    const int groups = c_.hidden / conv.group, taps = std::min(conv.taps, t % conv.block + 1);  // blocks lie one after another
    const float* own = product_in(s_.a, t, conv.project) + side * conv.taps * groups;
    float* line = s_.line[static_cast<size_t>(me.id)].get();
    for (int tap = 0; tap < taps; ++tap) {
        const float* base = conv.base.data() + (side * conv.taps + tap) * c_.hidden;
        const float* from = rows + static_cast<size_t>(t - tap) * static_cast<size_t>(stride);
        for (int g = 0, i = 0; g < groups; ++g)
            for (const int end = i + conv.group; i < end; ++i) {
                const float made = times(from[i], base[i] + own[tap * groups + g]);
                line[i] = tap == 0 ? made : line[i] + made;
            }
    }
    return line;
}

// Kernels of all tokens, then what they make of the kept states, encoded for matrices `ms`.
bool Model::Run::convolve_inputs(Seat& me, const LocalConv& conv, Claim claim, int index, std::initializer_list<const Matrix*> ms) {
    share(me, claim, index, conv.project.blocks, [&](int begin, int end) {
        const uint8_t* acts = s_.in[static_cast<size_t>(mine(me))].get(conv.project.acts());
        k_.matmul(conv.project, acts, n_, begin, end, s_.a.get(), conv.project.out_padded());
    });
    if (!meet(me)) return false;
    const Part part = tokens(me);
    for (int t = part.begin; t < part.end; ++t) {
        convolved(me, t, conv, 0, s_.convolved.get(), c_.hidden);
        encode_line(me, c_.hidden, n_, t, ms);
    }
    return meet(me);
}

}  // namespace outpace
