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

// One group of one row.
void unpack_group(Format format, const uint8_t* s, int g, int lane, float* out) {
    const Layout at = layout_of(format);
    const uint8_t* values = s + at.values_of(g);
    const auto half = [&](int offset) { return f16_to_float(u16_at(s + offset + 2 * lane)); };
    const auto byte = [&](int offset) { return static_cast<float>(s[offset + lane]); };
    float q[kGroup];
    for (int i = 0; at.acts == Acts::I8 && i < kGroup; ++i) q[i] = static_cast<float>(stored_at(at.group_bytes, values, i, lane));
    const auto scaled = [&](float scale, float zero, float minimum) {
        for (int i = 0; i < kGroup; ++i) out[i] = scale * (q[i] - zero) + minimum;
    };
    switch (format) {
        case Format::I4S: return scaled(half(at.scale_of(g)), 8.0f, 0.0f);
        case Format::I5S: return scaled(half(at.scale_of(g)), 16.0f, 0.0f);
        case Format::I8S: return scaled(half(at.scale_of(g)), 128.0f, 0.0f);
        case Format::I4M:
        case Format::I5M: return scaled(half(at.scale_of(g)), 0.0f, half(at.second_of(g)));
        case Format::K4:
        case Format::K5: return scaled(half(at.d) * byte(at.scale_of(g)), 0.0f, -(half(at.dmin) * byte(at.second_of(g))));
        case Format::I4C:
        case Format::K4C: {
            const float scale = format == Format::I4C ? half(at.scale_of(g))
                                                      : half(at.d) * static_cast<float>(static_cast<int8_t>(s[at.scale_of(g) + lane]));
            for (int i = 0; i < kGroup; ++i) out[i] = scale * static_cast<float>(kCode[static_cast<int>(q[i])]);
            return;
        }
        case Format::K6: {
            const float d = half(at.d);
            for (int i = 0; i < kGroup; ++i) {
                const int8_t scale = static_cast<int8_t>(s[(i < 16 ? at.scale_of(g) : at.second_of(g)) + lane]);
                out[i] = d * static_cast<float>(scale) * (q[i] - 32.0f);
            }
            return;
        }
        case Format::B16:
            for (int i = 0; i < kGroup; ++i) out[i] = bf16_to_float(u16_at(values + pair_at(i, lane) * 2));
            return;
        case Format::H16:
            for (int i = 0; i < kGroup; ++i) out[i] = f16_to_float(u16_at(values + plain_at(i, lane) * 2));
            return;
        case Format::F32:
            for (int i = 0; i < kGroup; ++i) std::memcpy(&out[i], values + plain_at(i, lane) * 4, 4);
            return;
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
