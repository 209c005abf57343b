// From the kernels' layout back to numbers; see pack.h.
#include <algorithm>
#include <cstring>

#include "weights/halves.h"
#include "weights/pack.h"

namespace outpace {
namespace {

// The integer that stands for input `i` of row `lane` in an integer format's group.
int stored_at(int group_bytes, const uint8_t* values, int i, int lane) {
    if (group_bytes == kBytes) return values[quant_at(i, lane)];
    const int pair = values[quant_at(i % 16, lane)], nibble = i < 16 ? pair & 15 : pair >> 4;
    if (group_bytes == kNibbles) return nibble;
    const bool five = group_bytes == kFives;
    const UpperBits its = five ? fifth_at(i, lane) : sixth_at(i, lane);
    return nibble | (values[kNibbles + its.byte] >> its.bit & (five ? 1 : 3)) << 4;
}

// One group of one row, as the table in layout.h says.
void unpack_group(Format format, const uint8_t* s, int g, int lane, float* out) {
    const Layout at = layout_of(format);
    const uint8_t* values = s + at.values_of(g);
    for (int i = 0; at.acts != Acts::I8 && i < kGroup; ++i) {
        if (format == Format::F32)
            std::memcpy(&out[i], values + plain_at(i, lane) * 4, 4);
        else
            out[i] = format == Format::B16 ? bf16_to_float(u16_at(values + pair_at(i, lane) * 2))
                                           : f16_to_float(u16_at(values + plain_at(i, lane) * 2));
    }
    if (at.acts != Acts::I8) return;
    const bool split = at.group_bytes == kSixes, code = format == Format::I4C || format == Format::K4C;
    const bool minimum = at.second >= 0 && !split;
    const auto half = [&](int offset) { return f16_to_float(u16_at(s + offset + 2 * lane)); };
    const auto scale_at = [&](int offset) {
        if (at.d < 0) return half(offset);
        return half(at.d) * static_cast<float>(minimum ? s[offset + lane] : static_cast<int8_t>(s[offset + lane]));
    };
    const float low = scale_at(at.scale_of(g)), high = split ? scale_at(at.second_of(g)) : low;
    const float added = !minimum   ? 0.0f
                        : at.d < 0 ? half(at.second_of(g))
                                   : -(half(at.dmin) * static_cast<float>(s[at.second_of(g) + lane]));
    const int zero = minimum ? 0 : at.group_bytes == kNibbles ? 8 : at.group_bytes == kFives ? 16 : split ? 32 : 128;
    for (int i = 0; i < kGroup; ++i) {
        const int q = stored_at(at.group_bytes, values, i, lane);
        out[i] = (i < 16 ? low : high) * static_cast<float>(code ? kCode[q] : q - zero);
        if (!code && !split) out[i] += added;
    }
}

}  // namespace

void unpack_row(const Matrix& m, int row, float* out) {
    const Layout at = layout_of(m.format);
    const uint8_t* block = m.data + static_cast<size_t>(row / kRows) * m.block_bytes;
    for (int col = 0; col < m.cols; col += kGroup) {
        const int group = col / kGroup;
        const uint8_t* superblock = block + static_cast<size_t>(group / at.groups) * static_cast<size_t>(at.bytes);
        float values[kGroup];
        unpack_group(m.format, superblock, group % at.groups, row % kRows, values);
        std::memcpy(out + col, values, static_cast<size_t>(std::min(kGroup, m.cols - col)) * sizeof(float));
    }
}

}  // namespace outpace
