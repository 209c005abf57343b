#include "weights/pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "platform.h"
#include "runtime/pool.h"
#include "weights/halves.h"
#include "weights/packed_file.h"

namespace outpace {
namespace {

void put_u16(uint8_t* p, uint16_t x) { std::memcpy(p, &x, 2); }

const SourceType& source_of(int source) {
    for (const SourceType& type : kSources)
        if (static_cast<int>(type.id) == source) return type;
    std::string known;
    for (const SourceType& type : kSources) known += std::string(known.empty() ? "" : ", ") + type.name;
    throw std::invalid_argument("weights of GGUF type " + std::to_string(source) + " are not supported: use one of " + known);
}

Format format_of(const SourceType& source, Target target) {
    if (target != Target::Keep && source.values != 1) throw std::invalid_argument("weights that are quantised already stay as they are");
    switch (target) {
        case Target::B16: return Format::B16;
        case Target::F16: return Format::H16;
        case Target::F32: return Format::F32;
        case Target::Int8: return Format::I8S;
        case Target::Int4: return Format::I4M;
        case Target::Keep: break;
    }
    return source.kept;
}

Matrix shape_of(Format format, int rows, int cols) {
    const Layout at = layout_of(format);
    Matrix m{};
    m.format = format;
    m.rows = rows;
    m.cols = cols;
    m.blocks = round_up(rows, 64) / kRows;
    m.groups = round_up(round_up(cols, kGroup) / kGroup, at.groups);
    m.block_bytes = static_cast<size_t>(m.groups / at.groups) * static_cast<size_t>(at.bytes);
    return m;
}

// One row of one superblock on its way into the layout: row `lane` of 16.
struct Slot {
    uint8_t* superblock;
    int lane;
    const Layout& at;

    void nibbles(int g, const uint8_t* q) const {  // q [32], 0 .. 15
        uint8_t* values = superblock + at.values_of(g);
        for (int i = 0; i < 16; ++i) values[quant_at(i, lane)] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
    }
    void paired(int g, const uint8_t* pairs) const {  // [16], inputs i and i + 16 in a byte, as the layout has them
        for (int i = 0; i < 16; i += 4) std::memcpy(superblock + at.values_of(g) + quant_at(i, lane), pairs + i, 4);
    }
    // q [32], of 5 or 6 bits: nibbles, and the rest where `upper_at` says. The memory was zero.
    template <UpperBits (*upper_at)(int, int)>
    void planes(int g, const uint8_t* q) const {
        uint8_t low[kGroup];
        for (int i = 0; i < kGroup; ++i) low[i] = q[i] & 15;
        nibbles(g, low);
        uint8_t* upper = superblock + at.values_of(g) + kNibbles;
        for (int i = 0; i < kGroup; ++i) {
            const UpperBits its = upper_at(i, lane);
            upper[its.byte] = static_cast<uint8_t>(upper[its.byte] | (q[i] >> 4) << its.bit);
        }
    }
    void fives(int g, const uint8_t* q) const { planes<fifth_at>(g, q); }
    void sixes(int g, const uint8_t* q) const { planes<sixth_at>(g, q); }
    void bytes(int g, const uint8_t* q) const {
        for (int i = 0; i < 32; i += 4) std::memcpy(superblock + at.values_of(g) + quant_at(i, lane), q + i, 4);
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
void pack_simple(const SourceType& source, const uint8_t* row, int groups, uint8_t* block, int lane, const Layout& at) {
    const bool minimum = at.second >= 0;  // so has the file's block: float16 scale, float16 minimum, then the values
    for (int g = 0; g < groups; ++g) {
        const Slot slot{block + static_cast<size_t>(g / at.groups) * at.bytes, lane, at};
        const int i = g % at.groups;
        const uint8_t* b = row + source.bytes * g;
        const uint8_t* values = b + (minimum ? 4 : 2);
        slot.half(at.scale_of(i), u16_at(b));
        if (minimum) slot.half(at.second_of(i), u16_at(b + 2));
        uint8_t q[32];
        switch (source.id) {
            case Source::Q4_0:
            case Source::Q4_1:
            case Source::IQ4_NL: slot.paired(i, values); break;
            case Source::Q5_0:
            case Source::Q5_1: {
                const uint8_t* high = values;
                const uint8_t* nibbles = high + 4;
                for (int k = 0; k < 32; ++k) {
                    const int low = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
                    q[k] = static_cast<uint8_t>(low | ((high[k / 8] >> (k % 8)) & 1) << 4);
                }
                slot.fives(i, q);
                break;
            }
            default:  // Q8_0
                for (int k = 0; k < 32; ++k) q[k] = values[k] ^ 0x80;
                slot.bytes(i, q);
        }
    }
}

// A row of 256-value superblocks.
void pack_k(const SourceType& source, const uint8_t* row, int superblocks, uint8_t* block, int lane, const Layout& at) {
    for (int s = 0; s < superblocks; ++s) {
        const Slot slot{block + static_cast<size_t>(s) * at.bytes, lane, at};
        const uint8_t* b = row + source.bytes * static_cast<size_t>(s);
        uint8_t q[32];
        if (source.id == Source::Q6_K) {
            for (int g = 0; g < 8; ++g) {  // 128 values share 64 bytes of low and 32 bytes of high bits
                const uint8_t* low = b + g / 4 * 64 + g % 2 * 32;
                const uint8_t* high = b + 128 + g / 4 * 32;
                for (int k = 0; k < 32; ++k) {
                    const int nibble = g % 4 < 2 ? low[k] & 15 : low[k] >> 4;
                    q[k] = static_cast<uint8_t>(nibble | ((high[k] >> (2 * (g % 4))) & 3) << 4);
                }
                slot.sixes(g, q);
                slot.byte(at.scale_of(g), b[192 + 2 * g]);
                slot.byte(at.second_of(g), b[193 + 2 * g]);
            }
            slot.half(at.d, u16_at(b + 208));
            continue;
        }
        if (source.id == Source::IQ4_XS) {  // d, 16 bits of scales' upper two, 4 bytes of their lower four, nibbles
            const int upper = u16_at(b + 2);
            for (int g = 0; g < 8; ++g) {
                const int low = b[4 + g / 2] >> 4 * (g % 2) & 15;
                slot.byte(at.scale_of(g), static_cast<uint8_t>((low | (upper >> 2 * g & 3) << 4) - 32));
                slot.paired(g, b + 8 + 16 * g);
            }
            slot.half(at.d, u16_at(b));
            continue;
        }
        const bool five = source.id == Source::Q5_K;
        const uint8_t* nibbles = b + (five ? 48 : 16);
        for (int g = 0; g < 8; ++g) {
            uint8_t scale, minimum;
            k_scale(b + 4, g, &scale, &minimum);
            for (int k = 0; k < 32; ++k) {
                const int pair = nibbles[g / 2 * 32 + k];
                const int high = five ? (b[16 + k] >> g) & 1 : 0;
                q[k] = static_cast<uint8_t>((g % 2 == 0 ? pair & 15 : pair >> 4) | high << 4);
            }
            if (five)
                slot.fives(g, q);
            else
                slot.nibbles(g, q);
            slot.byte(at.scale_of(g), scale);
            slot.byte(at.second_of(g), minimum);
        }
        slot.half(at.d, u16_at(b));
        slot.half(at.dmin, u16_at(b + 2));
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
        slot.half(slot.at.scale_of(i), d);
        slot.half(slot.at.second_of(i), m);
    } else {
        const uint16_t d = float_to_f16(std::max(high, -low) / 127.0f);
        const float scale = f16_to_float(d);
        for (int k = 0; k < kGroup; ++k) {
            const float x = scale > 0 ? std::nearbyint(w[k] / scale) : 0.0f;
            q[k] = static_cast<uint8_t>(static_cast<int>(std::min(std::max(x, -127.0f), 127.0f)) + 128);
        }
        slot.bytes(i, q);
        slot.half(slot.at.scale_of(i), d);
    }
}

// Whether every finite number stayed finite: float16 ends at 65504.
bool pack_plain(Source source, const uint8_t* row, int cols, Format format, int groups, uint8_t* block, int lane, const Layout& at) {
    bool fits = true;
    for (int g = 0; g < groups; ++g) {
        float w[kGroup] = {};
        for (int k = 0; k < kGroup && g * kGroup + k < cols; ++k) w[k] = plain_value(source, row, g * kGroup + k);
        uint8_t* superblock = block + static_cast<size_t>(g / at.groups) * at.bytes;
        uint8_t* values = superblock + at.values_of(g % at.groups);
        switch (format) {
            case Format::B16:
                for (int k = 0; k < kGroup; ++k) put_u16(values + pair_at(k, lane) * 2, float_to_bf16(w[k]));
                break;
            case Format::H16:
                for (int k = 0; k < kGroup; ++k) {
                    const uint16_t half = float_to_f16(w[k]);
                    fits = fits && ((half & 0x7FFF) != 0x7C00 || std::isinf(w[k]));
                    put_u16(values + plain_at(k, lane) * 2, half);
                }
                break;
            case Format::F32:
                for (int k = 0; k < kGroup; ++k) std::memcpy(values + plain_at(k, lane) * 4, &w[k], 4);
                break;
            default: quantize_group(w, format == Format::I4M, Slot{superblock, lane, at}, g % at.groups);
        }
    }
    return fits;
}

// One row of a matrix into row `lane` of its row block, which was zero. False: the format cannot hold one of its numbers.
bool pack_row(const SourceType& type, const uint8_t* row, int cols, Format format, uint8_t* block, int lane) {
    const Layout at = layout_of(format);
    if (type.values == 1) return pack_plain(type.id, row, cols, format, round_up(cols, kGroup) / kGroup, block, lane, at);
    if (at.d >= 0)
        pack_k(type, row, cols / type.values, block, lane, at);
    else
        pack_simple(type, row, cols / type.values, block, lane, at);
    return true;
}

}  // namespace

size_t row_bytes(int source, int64_t cols) {
    const SourceType& type = source_of(source);
    if (cols <= 0 || cols % type.values != 0)
        throw std::invalid_argument("rows of " + std::to_string(cols) + " values do not fit blocks of " + std::to_string(type.values));
    return static_cast<size_t>(cols / type.values) * static_cast<size_t>(type.bytes);
}

size_t packed_bytes(int source, int rows, int cols, Target target) {
    return shape_of(format_of(source_of(source), target), rows, cols).bytes();
}

std::shared_ptr<uint8_t> Arena::take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (!mapping_ || size_ - used_ < bytes) {
        constexpr size_t huge = size_t{2} << 20;
        const size_t size = (std::max(bytes, size_t{32} << 20) + 2 * huge - 1) / huge * huge;
        mapping_ = std::shared_ptr<uint8_t>(static_cast<uint8_t*>(take_pages(size)), [size](uint8_t* p) { give_pages(p, size); });
        size_ = size;
        used_ = 0;
    }
    std::shared_ptr<uint8_t> taken(mapping_, mapping_.get() + used_);
    used_ += bytes;
    return taken;
}

Matrix pack(Arena& arena, const uint8_t* data, int source, int rows, int cols, int heads, Target target, int threads) {
    const size_t stride = row_bytes(source, cols);
    const SourceType& type = source_of(source);
    if (rows <= 0 || (heads > 0 && (rows % heads != 0 || rows / heads % 2 != 0)))
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " rows cannot be packed");
    const Format format = format_of(type, target);
    Matrix m = shape_of(format, rows, cols);
    std::shared_ptr<uint8_t> memory = arena.take(m.bytes());
    uint8_t* out = memory.get();
    m.data = out;
    m.memory = memory;

    const int per_head = heads > 0 ? rows / heads : 0;
    std::atomic<bool> fits{true};
    const auto pack_blocks = [&](int begin, int end) {
        for (int row = begin * kRows; row < std::min(end * kRows, rows); ++row) {
            int from = row;
            if (heads > 0) {
                const int within = row % per_head, half = per_head / 2;
                from = row - within + 2 * (within % half) + within / half;
            }
            const uint8_t* in = data + static_cast<size_t>(from) * stride;
            uint8_t* block = out + static_cast<size_t>(row / kRows) * m.block_bytes;
            if (!pack_row(type, in, cols, format, block, row % kRows)) fits = false;
        }
    };
    std::vector<std::thread> helpers;
    if (m.bytes() < (size_t{1} << 20)) threads = 1;
    helpers.reserve(static_cast<size_t>(threads));
    int left = m.blocks;  // what no helper does, from the front
    try {
        for (int i = threads - 1; i > 0; --i) {
            const Part part = part_of(m.blocks, i, threads);
            helpers.emplace_back(pack_blocks, part.begin, part.end);
            left = part.begin;
        }
    } catch (const std::system_error&) {  // there are no more threads to be had: this one does the rest
    }
    pack_blocks(0, left);
    for (std::thread& helper : helpers) helper.join();
    if (!fits) throw std::invalid_argument("a weight is beyond 65504, the largest number of float16: use bfloat16 or float32");
    return m;
}

namespace {

// One row's share of numbers that lie by lane: `each` bytes of every `stride`, `total` in all.
void copy_lane(const uint8_t* from, int lane, uint8_t* to, int to_lane, int each, int stride, int total) {
    for (int at = 0; at < total; at += stride) std::memcpy(to + at + to_lane * each, from + at + lane * each, static_cast<size_t>(each));
}

}  // namespace

Matrix gather(Arena& arena, const Matrix& m, const int32_t* ids, int n) {
    Matrix its = shape_of(m.format, n, m.cols);
    std::shared_ptr<uint8_t> memory = arena.take(its.bytes());
    uint8_t* out = memory.get();
    its.data = out;
    its.memory = memory;
    const Layout at = layout_of(m.format);
    // Vectors of 64 bytes have four bytes a row (of float16 two such vectors' halves: 32 bytes, two a row).
    const int each = m.format == Format::H16 ? 2 : 4;
    const int scale = at.acts != Acts::I8 ? 0 : at.d >= 0 ? 1 : 2;
    for (int row = 0; row < n; ++row) {
        const uint8_t* from = m.data + static_cast<size_t>(ids[row] / kRows) * m.block_bytes;
        uint8_t* to = out + static_cast<size_t>(row / kRows) * its.block_bytes;
        const int lane = ids[row] % kRows, to_lane = row % kRows;
        for (size_t s = 0; s < m.block_bytes; s += static_cast<size_t>(at.bytes), from += at.bytes, to += at.bytes) {
            copy_lane(from, lane, to, to_lane, each, each * kRows, at.group_bytes * at.groups);
            for (int g = 0; g < at.groups && scale > 0; ++g)
                for (const int offset : {at.scale, at.second})
                    if (offset >= 0)
                        copy_lane(
                            from + offset + at.stride * g, lane, to + offset + at.stride * g, to_lane, scale, scale * kRows, scale * kRows);
            for (const int offset : {at.d, at.dmin})
                if (offset >= 0) copy_lane(from + offset, lane, to + offset, to_lane, 2, kHalves, kHalves);
        }
    }
    return its;
}

Matrix matrix_at(std::shared_ptr<const PackedFile> file, size_t offset, int source, int rows, int cols, Target target) {
    row_bytes(source, cols);
    Matrix m = shape_of(format_of(source_of(source), target), rows, cols);
    if (offset % 64 != 0 || offset > file->bytes() || m.bytes() > file->bytes() - offset)
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " is not within it");
    m.data = file->data() + offset;
    m.memory = std::const_pointer_cast<PackedFile>(std::move(file));
    return m;
}

bool row_is(const Matrix& m, int row, const uint8_t* stored, int source, Target target) {
    if (format_of(source_of(source), target) != m.format) return false;
    std::vector<uint8_t> block(m.block_bytes);
    pack_row(source_of(source), stored, m.cols, m.format, block.data(), 0);
    Matrix alone = m;
    alone.data = block.data();
    std::vector<float> is(static_cast<size_t>(m.cols)), should(is.size());
    unpack_row(m, row, is.data());
    unpack_row(alone, 0, should.data());
    return std::memcmp(is.data(), should.data(), is.size() * sizeof(float)) == 0;
}

}  // namespace outpace
