#include "runtime/kv.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>

namespace outpace {
namespace {

size_t blocks_for(int64_t positions) { return static_cast<size_t>((positions + kBlock - 1) / kBlock); }

}  // namespace

KV::KV(KVShape shape, int64_t limit, StateShape states)
    : shape_(std::move(shape)), limit_(limit), arena_(shape_.block()), states_(states) {}

const KV::Row& KV::at(int row) const {
    if (row < 0 || row >= static_cast<int>(rows_.size()) || !rows_[static_cast<size_t>(row)].used)
        throw std::out_of_range("KV row " + std::to_string(row) + " is not in use: alloc returns the rows that are");
    return rows_[static_cast<size_t>(row)];
}

int64_t KV::bytes_for(int64_t positions) const {
    if (positions < 0 || positions > std::numeric_limits<int>::max())
        throw std::invalid_argument("a row of " + std::to_string(positions) + " positions is not possible");
    return bytes_of(blocks_for(positions)) + (recurrent() ? states_.bytes_for(positions) : 0);
}

int64_t KV::growth(int row, int64_t n) const {
    const Row& r = at(row);
    if (n < 0 || n > std::numeric_limits<int>::max() - r.length)
        throw std::invalid_argument("KV row " + std::to_string(row) + " of length " + std::to_string(r.length) + " cannot grow by " +
                                    std::to_string(n) + " positions");
    const bool copies = n > 0 && r.length % kBlock != 0 && r.blocks.back()->owners > 1;
    return bytes_of(blocks_for(r.length + n) - r.blocks.size() + (copies ? 1 : 0)) + (recurrent() ? states_.growth(row, n) : 0);
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
    return bytes_of(alone) + (recurrent() ? states_.exclusive(unique) : 0);
}

int KV::alloc() {
    size_t row = 0;
    while (row < rows_.size() && rows_[row].used) ++row;
    if (row == rows_.size()) rows_.emplace_back();
    rows_[row].used = true;
    rows_[row].awaits = false;
    return static_cast<int>(row);
}

void KV::free(int row) {
    Row& r = at(row);
    shrink(r, 0);
    states_.clear(row);
    r.used = false;
}

int KV::reachable(int row, int n) const {
    const int most = std::min(std::max(n, 0), at(row).length);
    return at(row).awaits ? 0 : recurrent() ? states_.reachable(row, most) : most;
}

// n, if the row can be cut or forked there.
int KV::checked(int row, int n, const char* what) const {
    if (recurrent() && (at(row).awaits ? 0 : states_.reachable(row, n)) != n)
        throw std::invalid_argument(std::string("cannot ") + what + " " + std::to_string(n) + " of " + std::to_string(at(row).length) +
                                    " positions of KV row " + std::to_string(row) +
                                    ": its recurrent layers have passed them; `reachable` says what can be had");
    return n;
}

void KV::truncate(int row, int n) {
    Row& r = at(row);
    if (n < 0 || n > r.length)
        throw std::invalid_argument(
            "cannot truncate KV row " + std::to_string(row) + " of length " + std::to_string(r.length) + " to " + std::to_string(n));
    checked(row, n, "keep");
    if (recurrent()) states_.truncate(row, n);
    r.awaits = r.awaits && n > 0;
    shrink(r, n);
}

void KV::shrink(Row& row, int n) {
    row.length = n;
    for (size_t i = blocks_for(n); i < row.blocks.size(); ++i) give(row.blocks[i]);
    row.blocks.resize(blocks_for(n));
}

void KV::settle() {
    for (size_t i = 0; i < rows_.size(); ++i) {
        Row& row = rows_[i];
        if (const int at = static_cast<int>(i); recurrent() && row.used && !row.awaits && states_.length(at) != row.length) {
            states_.clear(at);  // the forward had gone over some of its tokens
            row.length = 0;
        }
        shrink(row, row.length);
    }
}

void KV::give(Block* block) {
    if (--block->owners > 0) return;
    spare_.push_back(block);  // never fails: see take
    --used_;
}

// So many blocks that no row has yet, each with one owner to be; all or none.
std::vector<KV::Block*> KV::take(size_t count, const char* what, int64_t beside) {
    if (limit_ >= 0 && bytes() + bytes_of(count) + beside > limit_)
        throw MemoryLimit(std::string(what) + " takes " + std::to_string(bytes_of(count) + beside) + " bytes of KV memory, but only " +
                          std::to_string(limit_ - bytes()) + " of " + std::to_string(limit_) +
                          " are free: shorten the requests, run fewer at once or raise kv_memory");
    while (limit_ >= 0 && bytes() + states_.snapshot_bytes(false) + bytes_of(count) + beside > limit_ && states_.drop_snapshot()) {}
    const size_t room = limit_ < 0 ? std::numeric_limits<size_t>::max()
                                   : static_cast<size_t>(limit_) / shape_.block();  // spare ones count, but states do not
    std::vector<Block*> taken;
    taken.reserve(count);
    while (spare_.size() < count) {
        blocks_.reserve(blocks_.size() < blocks_.capacity() ? 0 : std::max<size_t>(64, 2 * blocks_.size()));
        spare_.reserve(blocks_.capacity());  // `give` must not fail
        auto block = std::make_unique<Block>(Block{nullptr, 0});
        block->data = arena_.take(room - blocks_.size());
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
    int64_t beside = 0;
    std::unordered_map<const Block*, int> left;  // owners of a shared last block that have not copied it
    std::vector<bool> copies(needs.size(), false);
    for (size_t i = 0; i < needs.size(); ++i) {
        const auto [row, n] = needs[i];
        Row& r = at(row);
        if (n < 0 || n > std::numeric_limits<int>::max() - r.length)
            throw std::invalid_argument("KV row " + std::to_string(row) + " cannot grow by " + std::to_string(n) + " positions");
        if (r.awaits) throw std::invalid_argument("KV row " + std::to_string(row) + " has not taken its recurrent state yet");
        count += blocks_for(r.length + n) - r.blocks.size();
        if (recurrent()) beside += states_.growth(row, n);
        r.blocks.reserve(blocks_for(r.length + n));
        if (n == 0 || r.length % kBlock == 0 || r.blocks.back()->owners == 1) continue;
        int& others = left.emplace(r.blocks.back(), r.blocks.back()->owners).first->second;
        copies[i] = others > 1;  // the last owner may write where it is
        if (others-- > 1) ++count;
    }
    const std::vector<Block*> taken = take(count, "this forward", beside);
    auto next = taken.begin();
    for (size_t i = 0; i < needs.size(); ++i) {
        Row& r = at(needs[i].row);
        if (copies[i]) own(r, r.blocks.size() - 1, *next++);
        while (r.blocks.size() < blocks_for(r.length + needs[i].positions)) r.blocks.push_back(*next++);
    }
}

// Calls f(part's offset, piece's offset in it, bytes) for whatever a slot has in a block, layer by layer and head by head.
// A key is spread over its tile of 16 slots: pairs of bf16, floats or bytes, one place of each 16.
template <class F>
void KV::each_piece(int slot, const F& f) const {
    const size_t piece = shape_.type == KVType::I8 ? 1 : 4, at = static_cast<size_t>(slot);
    for (int layer = 0; layer < static_cast<int>(shape_.layers.size()); ++layer) {
        const size_t dim = static_cast<size_t>(shape_[layer].dim_padded()), row = dim * element_bytes(shape_.type), count = row / piece;
        const size_t value_dim = static_cast<size_t>(shape_[layer].value_padded()), value_row = value_dim * element_bytes(shape_.type);
        for (int head = 0; head < shape_[layer].heads; ++head) {
            const size_t keys = shape_.keys(layer, head), values = shape_.values(layer, head);
            for (size_t i = 0; i < count; ++i) f(keys, at / 16 * 16 * row + (16 * i + at % 16) * piece, piece);
            f(values, at * value_row, value_row);
            if (shape_.type != KVType::I8) continue;
            f(keys, kBlock * dim + 4 * at, size_t{4});
            f(values, kBlock * value_dim + 4 * at, size_t{4});
        }
    }
}

void KV::move_slot(Row& row, int from, int to) {
    const uint8_t* src = row.blocks[static_cast<size_t>(from / kBlock)]->data;
    uint8_t* dst = row.blocks[static_cast<size_t>(to / kBlock)]->data;
    std::vector<size_t> places;
    each_piece(from % kBlock, [&](size_t part, size_t at, size_t) { places.push_back(part + at); });
    auto place = places.begin();
    each_piece(to % kBlock, [&](size_t part, size_t at, size_t bytes) { std::memcpy(dst + part + at, src + *place++, bytes); });
}

void KV::compact(int row, int start, const int32_t* keep, int n) {
    Row& r = at(row);
    for (int i = 0; i < n; ++i)
        if (keep[i] < (i == 0 ? 0 : keep[i - 1] + 1) || start < 0 || keep[i] >= r.length - start)
            throw std::invalid_argument(
                "compact needs ascending slots within the row: keep[" + std::to_string(i) + "] is " + std::to_string(keep[i]));
    if (start < 0 || start > r.length) throw std::invalid_argument("compact starts beyond the row's end");
    if (recurrent() && start < states_.base(row))
        throw std::invalid_argument("compact starts at " + std::to_string(start) + ", and the row's recurrent layers have passed " +
                                    std::to_string(states_.base(row)));
    int first = 0;
    while (first < n && keep[first] == first) ++first;  // those stay where they are
    std::vector<size_t> shared;
    if (first < n)
        for (size_t b = static_cast<size_t>((start + first) / kBlock); b < blocks_for(start + n); ++b)
            if (r.blocks[b]->owners > 1) shared.push_back(b);
    const std::vector<Block*> copies = take(shared.size(), "keeping a part of what is shared");
    for (size_t i = 0; i < shared.size(); ++i) own(r, shared[i], copies[i]);
    for (int i = first; i < n; ++i) move_slot(r, start + keep[i], start + i);
    if (recurrent()) states_.compact(row, start, keep, n);
    shrink(r, start + n);
}

void KV::fork(int src, int dst, int n) {
    const Row& from = at(src);
    Row& to = at(dst);
    if (src == dst || n < 0 || n > from.length || to.length > 0)
        throw std::invalid_argument("cannot fork " + std::to_string(n) + " positions of KV row " + std::to_string(src) + " (length " +
                                    std::to_string(from.length) + ") into row " + std::to_string(dst) + " (length " +
                                    std::to_string(to.length) + "): it must be another row, and empty");
    checked(src, n, "fork");
    if (recurrent() && limit_ >= 0) {
        while (bytes() + states_.snapshot_bytes(false) + states_.fork_bytes(src, n) > limit_ && states_.drop_snapshot()) {}
        if (checked(src, n, "fork"); bytes() + states_.fork_bytes(src, n) > limit_)
            throw MemoryLimit("a beginning that is shared takes " + std::to_string(states_.fork_bytes(src, n)) +
                              " bytes of KV memory, but only " + std::to_string(limit_ - bytes()) + " of " + std::to_string(limit_) +
                              " are free: run fewer at once or raise kv_memory");
    }
    if (recurrent()) states_.fork(src, dst, n);
    to.blocks.assign(from.blocks.begin(), from.blocks.begin() + static_cast<std::ptrdiff_t>(blocks_for(n)));
    for (Block* block : to.blocks) ++block->owners;
    to.length = n;
}

void KV::export_block(int row, int i, uint8_t* to) const {
    const Row& r = at(row);
    if (i < 0 || i >= static_cast<int>(r.blocks.size()))
        throw std::invalid_argument(
            "KV row " + std::to_string(row) + " has " + std::to_string(r.blocks.size()) + " blocks, and none " + std::to_string(i));
    std::memcpy(to, block_of(row, i), shape_.block());
    for (int slot = std::min(kBlock, r.length - i * kBlock); slot < kBlock; ++slot)
        each_piece(slot, [&](size_t part, size_t at, size_t bytes) { std::memset(to + part + at, 0, bytes); });
}

void KV::import_block(int row, const uint8_t* from, int n) {
    Row& r = at(row);
    if (n < 1 || n > kBlock || r.length % kBlock != 0 || (recurrent() && r.length > 0 && !r.awaits))
        throw std::invalid_argument(
            "KV row " + std::to_string(row) + " of length " + std::to_string(r.length) + " cannot take a block of " + std::to_string(n));
    r.blocks.reserve(r.blocks.size() + 1);
    Block* block = take(1, "a beginning that a file has").front();
    std::memcpy(block->data, from, shape_.block());
    r.blocks.push_back(block);
    r.length += n;
    r.awaits = recurrent();
}

void KV::import_state(int row, const float* from) {
    Row& r = at(row);
    if (!r.awaits) throw std::invalid_argument("KV row " + std::to_string(row) + " awaits no recurrent state");
    take(0, "a recurrent state", states_.bytes_for(r.length));
    states_.take(row, r.length, from);
    r.awaits = false;
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
        if (recurrent() && row.used && !row.awaits) states_.check(static_cast<int>(&row - rows_.data()), row.length);
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
    require(limit_ < 0 || bytes() + (recurrent() ? states_.snapshot_bytes(true) : bytes_of(spare_.size())) <= limit_,
        "more KV memory is taken than allowed");
}

void KV::poison() {
    std::unordered_map<const Block*, int> used;  // slots of a block that its longest owner uses
    for (const Row& row : rows_)
        for (size_t i = 0; i < row.blocks.size(); ++i) {
            int& slots = used[row.blocks[i]];
            slots = std::max(slots, std::min(kBlock, row.length - static_cast<int>(i) * kBlock));
        }
    for (const std::unique_ptr<Block>& block : blocks_)
        for (int slot = used.count(block.get()) ? used[block.get()] : 0; slot < kBlock; ++slot)
            each_piece(slot, [&](size_t part, size_t at, size_t bytes) { std::memset(block->data + part + at, 0xFF, bytes); });
}

}  // namespace outpace
