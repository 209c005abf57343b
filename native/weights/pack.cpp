#include "weights/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "platform.h"
#include "weights/grid.h"
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

// Four inputs of a group, a byte each: a word is moved, masked and shifted as one.
constexpr uint32_t every(uint32_t byte) { return byte * 0x01010101u; }

uint32_t word_at(const uint8_t* p, int i) {
    uint32_t word;
    std::memcpy(&word, p + 4 * i, 4);
    return word;
}

// A group of a row as its format keeps it: integers, and the bits of what scales them (float16, or a byte beside a superblock's).
struct Group {
    uint32_t words[kGroup / 4];
    uint16_t scale = 0, second = 0;

    template <class Of>
    void fill(const Of& of) {
        uint8_t q[kGroup];
        for (int k = 0; k < kGroup; ++k) q[k] = static_cast<uint8_t>(of(k));
        std::memcpy(words, q, kGroup);
    }
    template <class Of>
    void fill_words(const Of& of) {
        for (int i = 0; i < kGroup / 4; ++i) words[i] = of(i);
    }
};

// Row `lane` of a superblock whose memory was zero: its group `g`. layout.h says where the bits of nibbles, fives and sixes go.
void put_group(const Layout& at, uint8_t* superblock, int g, int lane, const Group& group) {
    uint8_t* const values = superblock + at.values_of(g) + 4 * lane;
    const uint32_t* const w = group.words;
    const auto put_word = [&](int i, uint32_t word) { std::memcpy(values + 64 * i, &word, 4); };
    if (at.group_bytes == kBytes) {
        for (int i = 0; i < kGroup / 4; ++i) put_word(i, w[i]);
    } else {
        for (int i = 0; i < 4; ++i) put_word(i, (w[i] & every(15)) | (w[i + 4] & every(15)) << 4);
    }
    if (at.group_bytes == kFives) {
        uint32_t fifths = 0;
        for (int i = 0; i < 8; ++i) fifths |= (w[i] >> 4 & every(1)) << i;
        put_word(4, fifths);
    }
    for (int half = 0; at.group_bytes == kSixes && half < 2; ++half) {
        uint32_t upper = 0;
        for (int i = 0; i < 4; ++i) upper |= (w[4 * half + i] >> 4 & every(3)) << 2 * i;
        put_word(4 + half, upper);
    }
    const auto put = [&](int offset, uint16_t x) {
        if (at.d >= 0)
            superblock[offset + lane] = static_cast<uint8_t>(x);
        else
            put_u16(superblock + offset + 2 * lane, x);
    };
    put(at.scale_of(g), group.scale);
    if (at.second >= 0) put(at.second_of(g), group.second);
}

// Group `g` of a block of a file's row.
Group group_of(Source source, const uint8_t* b, int g) {
    Group x;
    const auto nibble = [](const uint8_t* pairs, int k) { return k < 16 ? pairs[k] & 15 : pairs[k - 16] >> 4; };
    const auto nibbles = [](const uint8_t* pairs, int i) { return word_at(pairs, i % 4) >> i / 4 * 4 & every(15); };
    const auto five = [&](const uint8_t* v, int k) { return nibble(v + 4, k) | (v[k / 8] >> k % 8 & 1) << 4; };
    x.scale = u16_at(b);
    switch (source) {
        case Source::Q4_0:
        case Source::IQ4_NL: x.fill_words([&](int i) { return nibbles(b + 2, i); }); break;
        case Source::Q5_0: x.fill([&](int k) { return five(b + 2, k); }); break;
        case Source::Q8_0: x.fill_words([&](int i) { return word_at(b + 2, i) ^ every(0x80); }); break;
        case Source::Q4_1:
        case Source::Q5_1:
            x.second = u16_at(b + 2);
            if (source == Source::Q4_1)
                x.fill_words([&](int i) { return nibbles(b + 4, i); });
            else
                x.fill([&](int k) { return five(b + 4, k); });
            break;
        case Source::Q6_K: {  // 128 values share 64 bytes of low and 32 bytes of high bits
            const uint8_t *low = b + g / 4 * 64 + g % 2 * 32, *high = b + 128 + g / 4 * 32;
            const int from = g % 4 / 2 * 4, pair = g % 4 * 2;
            x.fill_words([&](int i) { return (word_at(low, i) >> from & every(15)) | (word_at(high, i) >> pair & every(3)) << 4; });
            x.scale = b[192 + 2 * g], x.second = b[193 + 2 * g];
            break;
        }
        case Source::IQ4_XS:  // d, 16 bits of scales' upper two, 4 bytes of their lower four, nibbles
            x.scale = static_cast<uint8_t>(((b[4 + g / 2] >> 4 * (g % 2) & 15) | (u16_at(b + 2) >> 2 * g & 3) << 4) - 32);
            x.fill_words([&](int i) { return nibbles(b + 8 + 16 * g, i); });
            break;
        case Source::Q3_K: {  // 32 bytes of third bits, 64 of lower two, 12 of sixteen 6-bit scales
            const uint8_t *pairs = b + 32 + g / 4 * 32, *six = b + 96;
            const auto scale = [&](int i) {
                return static_cast<uint8_t>(((i < 8 ? six[i] & 15 : six[i - 8] >> 4) | (six[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32);
            };
            x.fill([&](int k) { return 32 + (pairs[k] >> 2 * (g % 4) & 3) - (b[k] >> g & 1 ? 0 : 4); });
            x.scale = scale(2 * g), x.second = scale(2 * g + 1);
            break;
        }
        case Source::IQ3_S: {  // d, 64 bytes of indices, 8 of their ninth bits, 32 of signs, 4 of eight 4-bit scales
            x.fill([&](int k) {
                const int index = b[2 + 8 * g + k / 4] | (b[66 + g] >> k / 4 & 1) << 8, magnitude = kOdds[kGrid[index] >> 3 * (k % 4) & 7];
                return 32 + (b[74 + 4 * g + k / 8] >> k % 8 & 1 ? -magnitude : magnitude);
            });
            x.scale = x.second = static_cast<uint16_t>(2 * (b[106 + g / 2] >> 4 * (g % 2) & 15) + 1);
            break;
        }
        case Source::TQ1_0: {  // base 3: 160 values in 32 bytes, 80 in 16, 16 in 4, then d
            x.scale = u16_at(b + 52);
            x.fill([&](int k) {
                const int i = 32 * g + k, from = i < 160 ? 0 : i < 240 ? 160 : 240, each = i < 160 ? 32 : i < 240 ? 16 : 4;
                const int at = (i < 160 ? 0 : i < 240 ? 32 : 48) + (i - from) % each;
                constexpr int kPowers[] = {1, 3, 9, 27, 81};
                return 7 + (static_cast<uint8_t>(b[at] * kPowers[(i - from) / each]) * 3 >> 8);
            });
            break;
        }
        case Source::TQ2_0:  // 64 bytes of two bits a value, then d
            x.scale = u16_at(b + 64);
            x.fill([&](int k) { return 7 + (b[g / 4 * 32 + k] >> 2 * (g % 4) & 3); });
            break;
        case Source::Q1_0:  // d, then a bit a value: its sign
            x.fill([&](int k) { return 7 + 2 * (b[2 + 4 * g + k / 8] >> k % 8 & 1); });
            break;
        case Source::MXFP4: {  // an exponent, nibbles: a sign and one of eight magnitudes
            constexpr int kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
            x.scale = float_to_f16(std::ldexp(1.0f, b[0] - 128));
            x.fill([&](int k) {
                const int four = nibble(b + 1, k), magnitude = kDoubled[four & 7];
                return 16 + (four & 8 ? -magnitude : magnitude);
            });
            break;
        }
        default: {  // Q4_K, Q5_K: d, dmin, 12 bytes of eight 6-bit scales and minima, then the fifth bits
            const uint8_t *six = b + 4, *fifths = b + 16, *pairs = b + (source == Source::Q5_K ? 48 : 16) + g / 2 * 32;
            x.scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | (six[g - 4] >> 6) << 4;
            x.second = g < 4 ? six[g + 4] & 63 : (six[g + 4] >> 4) | (six[g] >> 6) << 4;
            const uint32_t fifth = source == Source::Q5_K ? every(1) : 0;
            const int from = g % 2 * 4;
            x.fill_words([&](int i) { return (word_at(pairs, i) >> from & every(15)) | (word_at(fifths, i) >> g & fifth) << 4; });
        }
    }
    return x;
}

// Where a file's superblock has what scales it.
int scale_at(Source source) { return source == Source::Q6_K ? 208 : source == Source::Q3_K ? 108 : 0; }

float plain_value(Source source, const uint8_t* row, int i) {
    if (source == Source::F16) return f16_to_float(u16_at(row + 2 * static_cast<size_t>(i)));
    if (source == Source::BF16) return bf16_to_float(u16_at(row + 2 * static_cast<size_t>(i)));
    float x;
    std::memcpy(&x, row + 4 * static_cast<size_t>(i), 4);
    return x;
}

// int8: d = max|w| / 127 as float16, q = round(w / d). int4: m = min and d = (max - min) / 15 as float16,
// q = round((w - m) / d).
Group quantized(const float* w, bool four_bits) {
    const float low = *std::min_element(w, w + kGroup), high = *std::max_element(w, w + kGroup);
    Group x;
    x.second = float_to_f16(low);
    x.scale = float_to_f16(four_bits ? (high - low) / 15.0f : std::max(high, -low) / 127.0f);
    const float minimum = four_bits ? f16_to_float(x.second) : 0.0f, scale = f16_to_float(x.scale);
    const float least = four_bits ? 0.0f : -127.0f, most = four_bits ? 15.0f : 127.0f;
    x.fill([&](int k) {
        const float q = scale > 0 ? std::nearbyint((w[k] - minimum) / scale) : 0.0f;
        return static_cast<int>(std::min(std::max(q, least), most)) + (four_bits ? 0 : 128);
    });
    return x;
}

// One row of a matrix into row `lane` of its row block, which was zero. False: a number of it is none of the format's.
bool pack_row(const SourceType& type, const uint8_t* row, int cols, Format format, uint8_t* block, int lane) {
    const Layout at = layout_of(format);
    bool fits = true;
    for (int group = 0; group < round_up(cols, kGroup) / kGroup; ++group) {
        const int g = group % at.groups;
        uint8_t* superblock = block + static_cast<size_t>(group / at.groups) * static_cast<size_t>(at.bytes);
        if (type.values > 1) {
            const int each = type.values / kGroup;
            const uint8_t* b = row + static_cast<size_t>(group / each) * static_cast<size_t>(type.bytes);
            const Group one = group_of(type.id, b, group % each);
            put_group(at, superblock, g, lane, one);
            if (type.id == Source::MXFP4 && f16_to_float(one.scale) != std::ldexp(1.0f, b[0] - 128))
                fits = fits && std::all_of(one.words, one.words + kGroup / 4, [](uint32_t word) { return word == every(16); });
            if (at.d >= 0) put_u16(superblock + at.d + 2 * lane, u16_at(b + scale_at(type.id)));
            if (at.dmin >= 0) put_u16(superblock + at.dmin + 2 * lane, u16_at(b + 2));
            continue;
        }
        float w[kGroup] = {};
        for (int k = 0; k < kGroup && group * kGroup + k < cols; ++k) w[k] = plain_value(type.id, row, group * kGroup + k);
        uint8_t* values = superblock + at.values_of(g);
        if (at.acts == Acts::I8) put_group(at, superblock, g, lane, quantized(w, format == Format::I4M));
        for (int k = 0; at.acts != Acts::I8 && k < kGroup; ++k) {
            if (format == Format::B16) {
                put_u16(values + pair_at(k, lane) * 2, float_to_bf16(w[k]));
            } else if (format == Format::H16) {
                const uint16_t half = float_to_f16(w[k]);
                fits = fits && ((half & 0x7FFF) != 0x7C00 || std::isinf(w[k]));
                put_u16(values + plain_at(k, lane) * 2, half);
            } else {
                std::memcpy(values + plain_at(k, lane) * 4, &w[k], 4);
            }
        }
    }
    return fits;
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

Matrix Arena::matrix(Format format, int rows, int cols, uint8_t*& bytes) {
    Matrix m = shape_of(format, rows, cols);
    const std::shared_ptr<uint8_t> memory = take(m.bytes());
    m.data = bytes = memory.get();
    m.memory = memory;
    return m;
}

Matrix pack(Arena& arena, const uint8_t* data, int source, int rows, int cols, int heads, Target target, int threads) {
    const size_t stride = row_bytes(source, cols);
    const SourceType& type = source_of(source);
    if (rows <= 0 || (heads > 0 && (rows % heads != 0 || rows / heads % 2 != 0)))
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " rows cannot be packed");
    const Format format = format_of(type, target);
    uint8_t* out;
    const Matrix m = arena.matrix(format, rows, cols, out);
    const int per_head = heads > 0 ? rows / heads : 0;
    std::atomic<bool> fits{true};
    shared_out(static_cast<size_t>(m.blocks), m.bytes() < (size_t{1} << 20) ? 1 : threads, [&](size_t b) {
        uint8_t* block = out + b * m.block_bytes;
        for (int lane = 0, row = static_cast<int>(b) * kRows; lane < kRows && row < rows; ++lane, ++row) {
            int from = row;
            if (heads > 0) {
                const int within = row % per_head, half = per_head / 2;
                from = row - within + 2 * (within % half) + within / half;
            }
            if (!pack_row(type, data + static_cast<size_t>(from) * stride, cols, format, block, lane)) fits = false;
        }
    });
    if (!fits && type.values > 1)
        throw std::invalid_argument(std::string("a scale of type ") + type.name + " is no float16: use a file of another quantisation");
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
    uint8_t* out;
    const Matrix gathered = arena.matrix(m.format, n, m.cols, out);
    const Layout at = layout_of(m.format);
    // Vectors of 64 bytes have four bytes a row (of float16 two such vectors' halves: 32 bytes, two a row).
    const int each = m.format == Format::H16 ? 2 : 4;
    const int scale = at.acts != Acts::I8 ? 0 : at.d >= 0 ? 1 : 2;
    for (int row = 0; row < n; ++row) {
        const uint8_t* from = m.data + static_cast<size_t>(ids[row] / kRows) * m.block_bytes;
        uint8_t* to = out + static_cast<size_t>(row / kRows) * gathered.block_bytes;
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
    return gathered;
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
