#include "runtime/kv.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <unordered_map>

#include "platform.h"

namespace outpace {
namespace {

size_t blocks_for(int64_t positions) { return static_cast<size_t>((positions + kBlock - 1) / kBlock); }

uint8_t* allocate(size_t bytes) {
    const bool large = bytes >= (size_t{1} << 20);
    const size_t align = large ? size_t{2} << 20 : 4096;
    const size_t size = (bytes + 4095) / 4096 * 4096;
    void* raw = take_aligned(size, align);
    if (large) advise_huge(raw, size);
    return static_cast<uint8_t*>(raw);
}

}  // namespace

KV::KV(KVShape shape, int64_t limit) : shape_(shape), limit_(limit) {}

KV::~KV() {
    for (const std::unique_ptr<Block>& block : blocks_) give_aligned(block->data);
}

const KV::Row& KV::at(int row) const {
    if (row < 0 || row >= static_cast<int>(rows_.size()) || !rows_[static_cast<size_t>(row)].used)
        throw std::out_of_range("KV row " + std::to_string(row) + " is not in use: alloc returns the rows that are");
    return rows_[static_cast<size_t>(row)];
}

int64_t KV::bytes_for(int64_t positions) const {
    if (positions < 0 || positions > std::numeric_limits<int>::max())
        throw std::invalid_argument("a row of " + std::to_string(positions) + " positions is not possible");
    return bytes_of(blocks_for(positions));
}

int64_t KV::growth(int row, int64_t n) const {
    const Row& r = at(row);
    if (n < 0 || n > std::numeric_limits<int>::max() - r.length)
        throw std::invalid_argument("KV row " + std::to_string(row) + " of length " + std::to_string(r.length) +
                                    " cannot grow by " + std::to_string(n) + " positions");
    const bool copies = n > 0 && r.length % kBlock != 0 && r.blocks.back()->owners > 1;
    return bytes_of(blocks_for(r.length + n) - r.blocks.size() + (copies ? 1 : 0));
}

int64_t KV::exclusive(const std::vector<int>& rows) const {
    std::vector<int> unique = rows;
    std::sort(unique.begin(), unique.end());
    unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
    std::unordered_map<const Block*, int> seen;
    size_t alone = 0;
    for (const int row : unique)
        for (const Block* block : at(row).blocks)
            if (++seen[block] == block->owners) ++alone;
    return bytes_of(alone);
}

int KV::alloc() {
    size_t row = 0;
    while (row < rows_.size() && rows_[row].used) ++row;
    if (row == rows_.size()) rows_.emplace_back();
    rows_[row].used = true;
    return static_cast<int>(row);
}

void KV::free(int row) {
    Row& r = at(row);
    shrink(r, 0);
    r.used = false;
}

void KV::truncate(int row, int n) {
    Row& r = at(row);
    if (n < 0 || n > r.length)
        throw std::invalid_argument("cannot truncate KV row " + std::to_string(row) + " of length " +
                                    std::to_string(r.length) + " to " + std::to_string(n));
    shrink(r, n);
}

void KV::shrink(Row& row, int n) {
    row.length = n;
    for (size_t i = blocks_for(n); i < row.blocks.size(); ++i) give(row.blocks[i]);
    row.blocks.resize(blocks_for(n));
}

void KV::settle() {
    for (Row& row : rows_) shrink(row, row.length);
}

void KV::give(Block* block) {
    if (--block->owners > 0) return;
    spare_.push_back(block);  // never fails: see take
    --used_;
}

// So many blocks that no row has yet, each with one owner to be; all or none.
std::vector<KV::Block*> KV::take(size_t count, const char* what) {
    if (limit_ >= 0 && bytes_of(used_ + count) > limit_)
        throw MemoryLimit(std::string(what) + " takes " + std::to_string(bytes_of(count)) + " bytes of KV memory, but only " +
                          std::to_string(limit_ - bytes()) + " of " + std::to_string(limit_) +
                          " are free: shorten the requests, run fewer at once or raise kv_memory");
    std::vector<Block*> taken;
    taken.reserve(count);
    while (spare_.size() < count) {
        blocks_.reserve(blocks_.size() < blocks_.capacity() ? 0 : std::max<size_t>(64, 2 * blocks_.size()));
        spare_.reserve(blocks_.capacity());  // `give` must not fail
        auto block = std::make_unique<Block>(Block{nullptr, 0});
        block->data = allocate(shape_.block());
        spare_.push_back(block.get());
        blocks_.push_back(std::move(block));
    }
    for (size_t i = 0; i < count; ++i) {
        taken.push_back(spare_.back());
        spare_.pop_back();
        taken.back()->owners = 1;
    }
    used_ += count;
    return taken;
}

// A block that the row shares gives way to the row's own copy of it. Whole blocks: what lies beyond is never read.
void KV::own(Row& row, size_t i, Block* copy) {
    std::memcpy(copy->data, row.blocks[i]->data, shape_.block());
    give(row.blocks[i]);
    row.blocks[i] = copy;
}

void KV::grow(const std::vector<Need>& needs) {
    size_t count = 0;
    std::unordered_map<const Block*, int> left;  // owners of a shared last block that have not copied it
    std::vector<bool> copies(needs.size(), false);
    for (size_t i = 0; i < needs.size(); ++i) {
        const auto [row, n] = needs[i];
        Row& r = at(row);
        if (n < 0 || n > std::numeric_limits<int>::max() - r.length)
            throw std::invalid_argument("KV row " + std::to_string(row) + " cannot grow by " + std::to_string(n) + " positions");
        count += blocks_for(r.length + n) - r.blocks.size();
        r.blocks.reserve(blocks_for(r.length + n));
        if (n == 0 || r.length % kBlock == 0 || r.blocks.back()->owners == 1) continue;
        int& others = left.emplace(r.blocks.back(), r.blocks.back()->owners).first->second;
        copies[i] = others > 1;  // the last owner may write where it is
        if (others-- > 1) ++count;
    }
    const std::vector<Block*> taken = take(count, "this forward");
    auto next = taken.begin();
    for (size_t i = 0; i < needs.size(); ++i) {
        Row& r = at(needs[i].row);
        if (copies[i]) own(r, r.blocks.size() - 1, *next++);
        while (r.blocks.size() < blocks_for(r.length + needs[i].positions)) r.blocks.push_back(*next++);
    }
}

void KV::move_slot(Row& row, int from, int to) {
    const uint8_t* src = row.blocks[static_cast<size_t>(from / kBlock)]->data;
    uint8_t* dst = row.blocks[static_cast<size_t>(to / kBlock)]->data;
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
    int first = 0;
    while (first < n && keep[first] == first) ++first;  // those stay where they are
    std::vector<size_t> shared;
    if (first < n)
        for (size_t b = static_cast<size_t>((start + first) / kBlock); b < blocks_for(start + n); ++b)
            if (r.blocks[b]->owners > 1) shared.push_back(b);
    const std::vector<Block*> copies = take(shared.size(), "keeping a part of what is shared");
    for (size_t i = 0; i < shared.size(); ++i) own(r, shared[i], copies[i]);
    for (int i = first; i < n; ++i) move_slot(r, start + keep[i], start + i);
    shrink(r, start + n);
}

void KV::fork(int src, int dst, int n) {
    const Row& from = at(src);
    Row& to = at(dst);
    if (src == dst || n < 0 || n > from.length || to.length > 0)
        throw std::invalid_argument("cannot fork " + std::to_string(n) + " positions of KV row " + std::to_string(src) +
                                    " (length " + std::to_string(from.length) + ") into row " + std::to_string(dst) +
                                    " (length " + std::to_string(to.length) + "): it must be another row, and empty");
    to.blocks.assign(from.blocks.begin(), from.blocks.begin() + static_cast<std::ptrdiff_t>(blocks_for(n)));
    for (Block* block : to.blocks) ++block->owners;
    to.length = n;
}

std::vector<int> KV::rows() const {
    std::vector<int> used;
    for (size_t i = 0; i < rows_.size(); ++i)
        if (rows_[i].used) used.push_back(static_cast<int>(i));
    return used;
}

void KV::check() const {
    const auto require = [](bool holds, const char* what) {
        if (!holds) throw std::logic_error(what);
    };
    struct Place {
        int owners;
        size_t index;
    };
    std::unordered_map<const Block*, Place> found;
    for (const Row& row : rows_) {
        require(row.used || row.length == 0, "a freed KV row still has positions");
        require(row.length >= 0 && row.blocks.size() == blocks_for(row.length), "a KV row's blocks do not fit its length");
        for (size_t i = 0; i < row.blocks.size(); ++i) {
            Place& place = found.emplace(row.blocks[i], Place{0, i}).first->second;
            ++place.owners;
            require(place.index == i, "a KV block stands at two places");
        }
    }
    require(found.size() == used_, "the KV blocks in use do not add up");
    for (const Block* block : spare_) {
        require(block->owners == 0, "a spare KV block has an owner");
        require(found.emplace(block, Place{0, 0}).second, "a KV block is spare and in use, or spare twice");
    }
    require(found.size() == blocks_.size(), "KV blocks were lost");
    for (const std::unique_ptr<Block>& block : blocks_) {
        const auto at = found.find(block.get());
        require(at != found.end(), "a KV block is owned by nobody");
        require(at->second.owners == block->owners, "a KV block's owners are miscounted");
    }
    require(limit_ < 0 || held() <= limit_, "more KV memory is taken than allowed");
}

void KV::poison() {
    std::unordered_map<const Block*, int> used;  // slots of a block that its longest owner uses
    for (const Row& row : rows_)
        for (size_t i = 0; i < row.blocks.size(); ++i) {
            int& slots = used[row.blocks[i]];
            slots = std::max(slots, std::min(kBlock, row.length - static_cast<int>(i) * kBlock));
        }
    for (const std::unique_ptr<Block>& block : blocks_)
        for (int slot = used.count(block.get()) ? used[block.get()] : 0; slot < kBlock; ++slot) poison_slot(*block, slot);
}

void KV::poison_slot(Block& block, int slot) {
    const int dim = shape_.dim_padded(), pieces = shape_.f32 ? dim : dim / 2;
    const size_t row_bytes = static_cast<size_t>(dim) * (shape_.f32 ? 4 : 2);
    for (int layer = 0; layer < shape_.layers; ++layer) {
        for (int head = 0; head < shape_.heads; ++head) {
            uint8_t* k = block.data + shape_.keys(layer, head) + static_cast<size_t>(slot / 16 * pieces) * 64 + slot % 16 * 4;
            for (int i = 0; i < pieces; ++i) std::memset(k + 64 * i, 0xFF, 4);
            std::memset(block.data + shape_.values(layer, head) + slot * row_bytes, 0xFF, row_bytes);
        }
    }
}

}  // namespace outpace
