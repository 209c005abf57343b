#include "runtime/kv.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace outpace {
namespace {

int64_t blocks_for(int64_t capacity) { return (capacity + kBlock - 1) / kBlock; }

}  // namespace

KV::KV(KVShape shape, int64_t limit) : shape_(shape), limit_(limit) {}

KV::~KV() {
    for (Row& row : rows_)
        for (uint8_t* block : row.blocks) std::free(block);
    for (uint8_t* block : spare_) std::free(block);
}

const KV::Row& KV::at(int row) const {
    if (row < 0 || row >= static_cast<int>(rows_.size()) || !rows_[static_cast<size_t>(row)].used)
        throw std::out_of_range("KV row " + std::to_string(row) + " is not in use: alloc returns the rows that are");
    return rows_[static_cast<size_t>(row)];
}

int64_t KV::bytes_for(int64_t capacity) const {
    if (capacity < 0 || capacity > std::numeric_limits<int>::max())
        throw std::invalid_argument("a row of " + std::to_string(capacity) + " positions is not possible");
    return blocks_for(capacity) * static_cast<int64_t>(shape_.block());
}

int KV::alloc(int64_t capacity) {
    const int64_t wanted = bytes_for(capacity);
    if (limit_ >= 0 && bytes() + wanted > limit_)
        throw MemoryLimit("a row of " + std::to_string(capacity) + " positions takes " + std::to_string(wanted) +
                          " bytes of KV memory, but only " + std::to_string(limit_ - bytes()) + " of " +
                          std::to_string(limit_) + " are free: shorten the request or raise kv_memory");
    size_t row = 0;
    while (row < rows_.size() && rows_[row].used) ++row;
    if (row == rows_.size()) rows_.emplace_back();
    rows_[row].used = true;
    rows_[row].length = 0;
    rows_[row].capacity = static_cast<int>(capacity);
    reserved_ += blocks_for(capacity);
    return static_cast<int>(row);
}

void KV::free(int row) {
    Row& r = at(row);
    reserved_ -= blocks_for(r.capacity);
    spare_.insert(spare_.end(), r.blocks.begin(), r.blocks.end());
    r = Row{};
}

void KV::truncate(int row, int n) {
    Row& r = at(row);
    if (n < 0 || n > r.length)
        throw std::invalid_argument("cannot truncate KV row " + std::to_string(row) + " of length " +
                                    std::to_string(r.length) + " to " + std::to_string(n));
    r.length = n;
}

const uint8_t* const* KV::grow(int row, int n) {
    Row& r = at(row);
    if (n < 0 || n > r.capacity - r.length)
        throw std::invalid_argument("KV row " + std::to_string(row) + " has " + std::to_string(r.length) + " of " +
                                    std::to_string(r.capacity) + " positions in use: " + std::to_string(n) +
                                    " more do not fit");
    while (static_cast<int64_t>(r.blocks.size()) < blocks_for(r.length + n)) {
        uint8_t* block;
        if (!spare_.empty()) {
            block = spare_.back();
            spare_.pop_back();
        } else {
            const bool large = shape_.block() >= (size_t{1} << 20);
            const size_t align = large ? size_t{2} << 20 : 4096;
            const size_t size = (shape_.block() + 4095) / 4096 * 4096;
            void* raw = nullptr;
            if (posix_memalign(&raw, align, size) != 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
            if (large) madvise(raw, size, MADV_HUGEPAGE);
#endif
            block = static_cast<uint8_t*>(raw);
            ++total_;
        }
        r.blocks.push_back(block);
    }
    return r.blocks.data();
}

void KV::move_slot(Row& row, int from, int to) {
    if (from == to) return;
    const uint8_t* src = row.blocks[static_cast<size_t>(from / kBlock)];
    uint8_t* dst = row.blocks[static_cast<size_t>(to / kBlock)];
    const int dim = shape_.dim_padded(), a = from % kBlock, b = to % kBlock;
    // A key is spread over its tile of 16 slots: pairs of bf16, or floats, 64 bytes apart.
    const int pieces = shape_.f32 ? dim : dim / 2;
    const size_t tile = static_cast<size_t>(pieces) * 64, row_bytes = static_cast<size_t>(dim) * (shape_.f32 ? 4 : 2);
    for (int layer = 0; layer < shape_.layers; ++layer) {
        for (int head = 0; head < shape_.heads; ++head) {
            const uint8_t* ks = src + shape_.keys(layer, head) + static_cast<size_t>(a / 16) * tile + a % 16 * 4;
            uint8_t* kd = dst + shape_.keys(layer, head) + static_cast<size_t>(b / 16) * tile + b % 16 * 4;
            for (int i = 0; i < pieces; ++i) std::memcpy(kd + 64 * i, ks + 64 * i, 4);
            std::memcpy(dst + shape_.values(layer, head) + b * row_bytes, src + shape_.values(layer, head) + a * row_bytes,
                        row_bytes);
        }
    }
}

void KV::compact(int row, int start, const int32_t* keep, int n) {
    Row& r = at(row);
    for (int i = 0; i < n; ++i)
        if (keep[i] < (i == 0 ? 0 : keep[i - 1] + 1) || start < 0 || keep[i] >= r.length - start)
            throw std::invalid_argument("compact needs ascending slots within the row: keep[" + std::to_string(i) + "] is " +
                                        std::to_string(keep[i]));
    if (start < 0 || start > r.length) throw std::invalid_argument("compact starts beyond the row's end");
    for (int i = 0; i < n; ++i) move_slot(r, start + keep[i], start + i);
    r.length = start + n;
}

void KV::fork(int src, int dst, int n) {
    const Row& from = at(src);
    Row& to = at(dst);
    if (src == dst || n < 0 || n > from.length || n > to.capacity)
        throw std::invalid_argument("cannot fork " + std::to_string(n) + " positions of KV row " + std::to_string(src) +
                                    " (length " + std::to_string(from.length) + ") into row " + std::to_string(dst) +
                                    " (capacity " + std::to_string(to.capacity) + ")");
    to.length = 0;
    grow(dst, n);
    for (int64_t b = 0; b < blocks_for(n); ++b)  // whole blocks: what lies beyond n is never read
        std::memcpy(to.blocks[static_cast<size_t>(b)], from.blocks[static_cast<size_t>(b)], shape_.block());
    to.length = n;
}

std::vector<int> KV::rows() const {
    std::vector<int> used;
    for (size_t i = 0; i < rows_.size(); ++i)
        if (rows_[i].used) used.push_back(static_cast<int>(i));
    return used;
}

void KV::check() const {
    int64_t reserved = 0;
    size_t blocks = spare_.size();
    for (const Row& row : rows_) {
        blocks += row.blocks.size();
        if (!row.used) {
            if (!row.blocks.empty() || row.length != 0) throw std::logic_error("a freed KV row still has positions");
            continue;
        }
        reserved += blocks_for(row.capacity);
        if (row.length < 0 || row.length > row.capacity) throw std::logic_error("a KV row is longer than its capacity");
        if (static_cast<int64_t>(row.blocks.size()) < blocks_for(row.length)) throw std::logic_error("a KV row lacks blocks");
        if (static_cast<int64_t>(row.blocks.size()) > blocks_for(row.capacity))
            throw std::logic_error("a KV row has more blocks than it reserved");
    }
    if (reserved != reserved_) throw std::logic_error("the reserved KV memory does not add up");
    if (blocks != total_) throw std::logic_error("KV blocks were lost");
    if (limit_ >= 0 && bytes() > limit_) throw std::logic_error("more KV memory is reserved than allowed");
}

void KV::poison() {
    for (uint8_t* block : spare_) std::memset(block, 0xFF, shape_.block());
    for (Row& row : rows_) {
        for (size_t b = 0; b < row.blocks.size(); ++b) {
            for (int slot = 0; slot < kBlock; ++slot) {
                if (static_cast<int>(b) * kBlock + slot < row.length) continue;
                const int dim = shape_.dim_padded(), pieces = shape_.f32 ? dim : dim / 2;
                const size_t row_bytes = static_cast<size_t>(dim) * (shape_.f32 ? 4 : 2);
                for (int layer = 0; layer < shape_.layers; ++layer) {
                    for (int head = 0; head < shape_.heads; ++head) {
                        uint8_t* k = row.blocks[b] + shape_.keys(layer, head) +
                                     static_cast<size_t>(slot / 16 * pieces) * 64 + slot % 16 * 4;
                        for (int i = 0; i < pieces; ++i) std::memset(k + 64 * i, 0xFF, 4);
                        std::memset(row.blocks[b] + shape_.values(layer, head) + slot * row_bytes, 0xFF, row_bytes);
                    }
                }
            }
        }
    }
}

}  // namespace outpace
