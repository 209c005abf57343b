#include "weights/pack.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "weights/halves.h"
#include "runtime/pool.h"

namespace outpace {
namespace {

uint16_t u16_at(const uint8_t* p) {
    uint16_t x;
    std::memcpy(&x, p, 2);
    return x;
}
void put_u16(uint8_t* p, uint16_t x) { std::memcpy(p, &x, 2); }

struct SourceBlock {
    int values, bytes;
};
SourceBlock source_block(int source) {
    switch (static_cast<Source>(source)) {
        case Source::F32: return {1, 4};
        case Source::F16: return {1, 2};
        case Source::BF16: return {1, 2};
        case Source::Q4_0: return {32, 18};
        case Source::Q4_1: return {32, 20};
        case Source::Q5_0: return {32, 22};
        case Source::Q5_1: return {32, 24};
        case Source::Q8_0: return {32, 34};
        case Source::Q4_K: return {256, 144};
        case Source::Q5_K: return {256, 176};
        case Source::Q6_K: return {256, 210};
    }
    throw std::invalid_argument("weights of GGUF type " + std::to_string(source) +
                                " are not supported: use Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16 or F32");
}

Format format_of(int source, Target target) {
    switch (target) {
        case Target::B16: return Format::B16;
        case Target::F32: return Format::F32;
        case Target::Int8: return Format::I8S;
        case Target::Int4: return Format::I4M;
        case Target::Keep: break;
    }
    switch (static_cast<Source>(source)) {
        case Source::F32: return Format::F32;
        case Source::F16: return Format::H16;
        case Source::BF16: return Format::B16;
        case Source::Q4_0: return Format::I4S;
        case Source::Q4_1: return Format::I4M;
        case Source::Q5_0: return Format::I8S;
        case Source::Q5_1: return Format::I8M;
        case Source::Q8_0: return Format::I8S;
        case Source::Q4_K: return Format::K4;
        case Source::Q5_K: return Format::K5;
        case Source::Q6_K: return Format::K6;
    }
    return Format::F32;
}

// One row of one superblock on its way into the layout: row `lane` of 16.
struct Slot {
    uint8_t* superblock;
    int lane;

    void nibbles(int g, const uint8_t* q) const {  // q [32], 0 .. 15
        for (int i = 0; i < 16; ++i)
            superblock[256 * g + i / 4 * 64 + lane * 4 + i % 4] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
    }
    void bytes(int g, const uint8_t* q) const {
        for (int i = 0; i < 32; i += 4) std::memcpy(superblock + 512 * g + i * 16 + lane * 4, q + i, 4);
    }
    void half(int offset, uint16_t x) const { put_u16(superblock + offset + 2 * lane, x); }
    void byte(int offset, uint8_t x) const { superblock[offset + lane] = x; }
};

// The eight 6-bit scales and minima of Q4_K and Q5_K, packed in 12 bytes.
void k_scale(const uint8_t* packed, int g, uint8_t* scale, uint8_t* minimum) {
    if (g < 4) {
        *scale = packed[g] & 63;
        *minimum = packed[g + 4] & 63;
    } else {
        *scale = static_cast<uint8_t>((packed[g + 4] & 0x0F) | (packed[g - 4] >> 6) << 4);
        *minimum = static_cast<uint8_t>((packed[g + 4] >> 4) | (packed[g] >> 6) << 4);
    }
}

// A row of 32-value blocks.
void pack_simple(Source source, const uint8_t* row, int groups, uint8_t* block, int lane, const Geometry& geo) {
    for (int g = 0; g < groups; ++g) {
        const Slot slot{block + static_cast<size_t>(g / 2) * geo.bytes, lane};
        const int i = g % 2;
        uint8_t q[32];
        switch (source) {
            case Source::Q4_0:
            case Source::Q4_1: {
                const bool minimum = source == Source::Q4_1;
                const uint8_t* b = row + (minimum ? 20 : 18) * g;
                const uint8_t* nibbles = b + (minimum ? 4 : 2);
                for (int k = 0; k < 4; ++k)  // the file pairs input i with i + 16, as the layout does
                    std::memcpy(slot.superblock + 256 * i + 64 * k + 4 * lane, nibbles + 4 * k, 4);
                slot.half(512 + (minimum ? 64 : 32) * i, u16_at(b));
                if (minimum) slot.half(544 + 64 * i, u16_at(b + 2));
                break;
            }
            case Source::Q5_0:
            case Source::Q5_1: {
                const bool minimum = source == Source::Q5_1;
                const uint8_t* b = row + (minimum ? 24 : 22) * g;
                const uint8_t* high = b + (minimum ? 4 : 2);
                const uint8_t* nibbles = high + 4;
                for (int k = 0; k < 32; ++k) {
                    const int low = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
                    const int value = low | ((high[k / 8] >> (k % 8)) & 1) << 4;
                    q[k] = static_cast<uint8_t>(minimum ? value : value - 16 + 128);
                }
                slot.bytes(i, q);
                slot.half(1024 + (minimum ? 64 : 32) * i, u16_at(b));
                if (minimum) slot.half(1056 + 64 * i, u16_at(b + 2));
                break;
            }
            default: {  // Q8_0
                const uint8_t* b = row + 34 * g;
                for (int k = 0; k < 32; ++k) q[k] = b[2 + k] ^ 0x80;
                slot.bytes(i, q);
                slot.half(1024 + 32 * i, u16_at(b));
            }
        }
    }
}

// A row of 256-value superblocks.
void pack_k(Source source, const uint8_t* row, int superblocks, uint8_t* block, int lane, const Geometry& geo) {
    for (int s = 0; s < superblocks; ++s) {
        const Slot slot{block + static_cast<size_t>(s) * geo.bytes, lane};
        uint8_t q[32];
        if (source == Source::Q6_K) {
            const uint8_t* b = row + 210 * static_cast<size_t>(s);
            for (int g = 0; g < 8; ++g) {  // 128 values share 64 bytes of low and 32 bytes of high bits
                const uint8_t* low = b + g / 4 * 64 + g % 2 * 32;
                const uint8_t* high = b + 128 + g / 4 * 32;
                for (int k = 0; k < 32; ++k) {
                    const int nibble = g % 4 < 2 ? low[k] & 15 : low[k] >> 4;
                    const int value = nibble | ((high[k] >> (2 * (g % 4))) & 3) << 4;
                    q[k] = static_cast<uint8_t>(value - 32 + 128);
                }
                slot.bytes(g, q);
                slot.byte(4096 + 32 * g, b[192 + 2 * g]);
                slot.byte(4112 + 32 * g, b[193 + 2 * g]);
            }
            slot.half(4352, u16_at(b + 208));
            continue;
        }
        const bool five = source == Source::Q5_K;
        const uint8_t* b = row + (five ? 176 : 144) * static_cast<size_t>(s);
        const uint8_t* nibbles = b + (five ? 48 : 16);
        const int tail = five ? 4096 : 2048;
        for (int g = 0; g < 8; ++g) {
            uint8_t scale, minimum;
            k_scale(b + 4, g, &scale, &minimum);
            for (int k = 0; k < 32; ++k) {
                const int pair = nibbles[g / 2 * 32 + k];
                const int high = five ? (b[16 + k] >> g) & 1 : 0;
                q[k] = static_cast<uint8_t>((g % 2 == 0 ? pair & 15 : pair >> 4) | high << 4);
            }
            if (five)
                slot.bytes(g, q);
            else
                slot.nibbles(g, q);
            slot.byte(tail + 32 * g, scale);
            slot.byte(tail + 32 * g + 16, minimum);
        }
        slot.half(tail + 256, u16_at(b));
        slot.half(tail + 288, u16_at(b + 2));
    }
}

float plain_value(Source source, const uint8_t* row, int i) {
    if (source == Source::F16) return f16_to_float(u16_at(row + 2 * static_cast<size_t>(i)));
    if (source == Source::BF16) return bf16_to_float(u16_at(row + 2 * static_cast<size_t>(i)));
    float x;
    std::memcpy(&x, row + 4 * static_cast<size_t>(i), 4);
    return x;
}

// int8: d = max|w| / 127 as float16, q = round(w / d). int4: m = min and d = (max - min) / 15 as float16,
// q = round((w - m) / d).
void quantize_group(const float* w, bool four_bits, const Slot& slot, int i) {
    float low = w[0], high = w[0];
    for (int k = 1; k < kGroup; ++k) {
        low = std::min(low, w[k]);
        high = std::max(high, w[k]);
    }
    uint8_t q[kGroup];
    if (four_bits) {
        const uint16_t m = float_to_f16(low), d = float_to_f16((high - low) / 15.0f);
        const float minimum = f16_to_float(m), scale = f16_to_float(d);
        for (int k = 0; k < kGroup; ++k) {
            const float x = scale > 0 ? std::nearbyint((w[k] - minimum) / scale) : 0.0f;
            q[k] = static_cast<uint8_t>(std::min(std::max(x, 0.0f), 15.0f));
        }
        slot.nibbles(i, q);
        slot.half(512 + 64 * i, d);
        slot.half(544 + 64 * i, m);
    } else {
        const uint16_t d = float_to_f16(std::max(high, -low) / 127.0f);
        const float scale = f16_to_float(d);
        for (int k = 0; k < kGroup; ++k) {
            const float x = scale > 0 ? std::nearbyint(w[k] / scale) : 0.0f;
            q[k] = static_cast<uint8_t>(static_cast<int>(std::min(std::max(x, -127.0f), 127.0f)) + 128);
        }
        slot.bytes(i, q);
        slot.half(1024 + 32 * i, d);
    }
}

void pack_plain(Source source, const uint8_t* row, int cols, Format format, int groups, uint8_t* block, int lane,
                const Geometry& geo) {
    for (int g = 0; g < groups; ++g) {
        float w[kGroup] = {};
        for (int k = 0; k < kGroup && g * kGroup + k < cols; ++k) w[k] = plain_value(source, row, g * kGroup + k);
        uint8_t* superblock = block + static_cast<size_t>(g / 2) * geo.bytes;
        uint8_t* at = superblock + g % 2 * (geo.bytes / 2);
        switch (format) {
            case Format::B16:
                for (int k = 0; k < kGroup; ++k) put_u16(at + ((k / 2 * kRows + lane) * 2 + k % 2) * 2, float_to_bf16(w[k]));
                break;
            case Format::H16:
                for (int k = 0; k < kGroup; ++k) put_u16(at + (k * kRows + lane) * 2, float_to_f16(w[k]));
                break;
            case Format::F32:
                for (int k = 0; k < kGroup; ++k) std::memcpy(at + (k * kRows + lane) * 4, &w[k], 4);
                break;
            default:
                quantize_group(w, format == Format::I4M, Slot{superblock, lane}, g % 2);
        }
    }
}

}  // namespace

size_t row_bytes(int source, int64_t cols) {
    const SourceBlock block = source_block(source);
    if (cols <= 0 || cols % block.values != 0)
        throw std::invalid_argument("rows of " + std::to_string(cols) + " values do not fit blocks of " +
                                    std::to_string(block.values));
    return static_cast<size_t>(cols / block.values) * static_cast<size_t>(block.bytes);
}

std::shared_ptr<uint8_t> Arena::take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (!mapping_ || size_ - used_ < bytes) {
        constexpr size_t huge = size_t{2} << 20;
        const size_t size = (std::max(bytes, size_t{32} << 20) + 2 * huge - 1) / huge * huge;
        void* raw = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (raw == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(raw, size, MADV_HUGEPAGE);  // advice only: without huge pages it is merely slower
#endif
        mapping_ = std::shared_ptr<uint8_t>(static_cast<uint8_t*>(raw), [size](uint8_t* p) { munmap(p, size); });
        size_ = size;
        used_ = 0;
    }
    std::shared_ptr<uint8_t> taken(mapping_, mapping_.get() + used_);
    used_ += bytes;
    return taken;
}

Matrix pack(Arena& arena, const uint8_t* data, int source, int rows, int cols, int heads, Target target, int threads) {
    const size_t stride = row_bytes(source, cols);
    const bool plain = source_block(source).values == 1;
    if (target != Target::Keep && !plain) throw std::invalid_argument("weights that are quantised already stay as they are");
    if (rows <= 0 || (heads > 0 && (rows % heads != 0 || rows / heads % 2 != 0)))
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " rows cannot be packed");
    const Format format = format_of(source, target);
    const Geometry geo = geometry(format);
    Matrix m{};
    m.format = format;
    m.rows = rows;
    m.cols = cols;
    m.blocks = round_up(rows, 64) / kRows;
    m.groups = round_up(round_up(cols, kGroup) / kGroup, geo.groups);
    m.block_bytes = static_cast<size_t>(m.groups / geo.groups) * static_cast<size_t>(geo.bytes);
    std::shared_ptr<uint8_t> memory = arena.take(m.bytes());
    uint8_t* out = memory.get();
    m.data = out;
    m.memory = memory;

    const int per_head = heads > 0 ? rows / heads : 0;
    const auto pack_blocks = [&](int begin, int end) {
        for (int row = begin * kRows; row < std::min(end * kRows, rows); ++row) {
            int from = row;
            if (heads > 0) {
                const int within = row % per_head, half = per_head / 2;
                from = row - within + 2 * (within % half) + within / half;
            }
            const uint8_t* in = data + static_cast<size_t>(from) * stride;
            uint8_t* block = out + static_cast<size_t>(row / kRows) * m.block_bytes;
            const Source type = static_cast<Source>(source);
            if (plain)
                pack_plain(type, in, cols, format, round_up(cols, kGroup) / kGroup, block, row % kRows, geo);
            else if (geo.groups == 8)
                pack_k(type, in, cols / 256, block, row % kRows, geo);
            else
                pack_simple(type, in, cols / 32, block, row % kRows, geo);
        }
    };
    std::vector<std::thread> helpers;
    if (m.bytes() < (size_t{1} << 20)) threads = 1;
    for (int i = 1; i < threads; ++i) {
        const Part part = part_of(m.blocks, i, threads);
        helpers.emplace_back(pack_blocks, part.begin, part.end);
    }
    pack_blocks(0, part_of(m.blocks, 0, threads).end);
    for (std::thread& helper : helpers) helper.join();
    return m;
}

namespace {

// One group of one row.
void unpack_group(Format format, const uint8_t* s, int g, int lane, float* out) {
    const auto half = [&](int offset) { return f16_to_float(u16_at(s + offset + 2 * lane)); };
    float q[kGroup];
    if (format == Format::I4S || format == Format::I4M || format == Format::K4) {
        for (int i = 0; i < 16; ++i) {
            const int pair = s[256 * g + i / 4 * 64 + lane * 4 + i % 4];
            q[i] = static_cast<float>(pair & 15);
            q[i + 16] = static_cast<float>(pair >> 4);
        }
    } else if (geometry(format).acts == Acts::I8) {
        for (int i = 0; i < kGroup; ++i) q[i] = static_cast<float>(s[512 * g + i / 4 * 64 + lane * 4 + i % 4]);
    }
    const auto scaled = [&](float scale, float zero, float minimum) {
        for (int i = 0; i < kGroup; ++i) out[i] = scale * (q[i] - zero) + minimum;
    };
    switch (format) {
        case Format::I4S: return scaled(half(512 + 32 * g), 8.0f, 0.0f);
        case Format::I4M: return scaled(half(512 + 64 * g), 0.0f, half(544 + 64 * g));
        case Format::I8S: return scaled(half(1024 + 32 * g), 128.0f, 0.0f);
        case Format::I8M: return scaled(half(1024 + 64 * g), 0.0f, half(1056 + 64 * g));
        case Format::K4:
        case Format::K5: {
            const int tail = format == Format::K4 ? 2048 : 4096;
            return scaled(half(tail + 256) * static_cast<float>(s[tail + 32 * g + lane]), 0.0f,
                          -(half(tail + 288) * static_cast<float>(s[tail + 32 * g + 16 + lane])));
        }
        case Format::K6: {
            const float d = half(4352);
            for (int i = 0; i < kGroup; ++i) {
                const int8_t scale = static_cast<int8_t>(s[4096 + 32 * g + i / 16 * 16 + lane]);
                out[i] = d * static_cast<float>(scale) * (q[i] - 128.0f);
            }
            return;
        }
        case Format::B16:
            for (int i = 0; i < kGroup; ++i) out[i] = bf16_to_float(u16_at(s + g * 1024 + ((i / 2 * kRows + lane) * 2 + i % 2) * 2));
            return;
        case Format::H16:
            for (int i = 0; i < kGroup; ++i) out[i] = f16_to_float(u16_at(s + g * 1024 + (i * kRows + lane) * 2));
            return;
        case Format::F32:
            for (int i = 0; i < kGroup; ++i) std::memcpy(&out[i], s + g * 2048 + (i * kRows + lane) * 4, 4);
            return;
    }
}

}  // namespace

void unpack_row(const Matrix& m, int row, float* out) {
    const Geometry geo = geometry(m.format);
    const uint8_t* block = m.data + static_cast<size_t>(row / kRows) * m.block_bytes;
    for (int at = 0; at < m.cols; at += kGroup) {
        const int group = at / kGroup;
        const uint8_t* superblock = block + static_cast<size_t>(group / geo.groups) * static_cast<size_t>(geo.bytes);
        float values[kGroup];
        unpack_group(m.format, superblock, group % geo.groups, row % kRows, values);
        std::memcpy(out + at, values, static_cast<size_t>(std::min(kGroup, m.cols - at)) * sizeof(float));
    }
}

}  // namespace outpace
