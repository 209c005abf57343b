#include "runtime/kv.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>

namespace outpace {
KV::KV(KVShape shape, int64_t limit, StateShape states)
    : shape_(std::move(shape)), limit_(limit), pools_{KVBlocks(shape_.block[kFull]), KVBlocks(shape_.block[kWindowed])}, states_(states) {}

const KV::Row& KV::at(int row) const {
    if (row < 0 || row >= static_cast<int>(rows_.size()) || !rows_[static_cast<size_t>(row)].used)
        throw std::out_of_range("KV row " + std::to_string(row) + " is not in use: alloc returns the rows that are");
    return rows_[static_cast<size_t>(row)];
}

int64_t KV::bytes_for(int64_t positions) const {
    if (positions < 0 || positions > std::numeric_limits<int>::max())
        throw std::invalid_argument("a row of " + std::to_string(positions) + " positions is not possible");
    // Of windowed layers: from the first block that any of the last kBehind + 1 tokens sees to the one that the next writes into.
    const size_t most = static_cast<size_t>((shape_.window - 1 + kBlock - 1) / kBlock + 1 + kBehind / kBlock);
    return pools_[kFull].bytes(blocks_for(kFull, positions)) + pools_[kWindowed].bytes(std::min(blocks_for(kWindowed, positions), most)) +
           (recurrent() ? states_.bytes_for(positions) : 0);
}

int64_t KV::growth(int row, int64_t n, int64_t settled) const {
    const Row& r = at(row);
    if (n < 0 || n > std::numeric_limits<int>::max() - r.length)
        throw std::invalid_argument("KV row " + std::to_string(row) + " of length " + std::to_string(r.length) + " cannot grow by " +
                                    std::to_string(n) + " positions");
    int64_t bytes = recurrent() ? states_.growth(row, n, settled) : 0;
    for (int pool = 0; pool < kPools && n > 0; ++pool) {
        const std::vector<Block*>& blocks = r.blocks[static_cast<size_t>(pool)];
        size_t more = blocks_for(pool, r.length + n) - blocks.size();
        if (r.length % kBlock != 0 && !blocks.empty() && blocks.back()->shared(r.length % kBlock)) ++more;
        bytes += pools_[static_cast<size_t>(pool)].bytes(more);
    }
    for (size_t i = r.first; i < first_left(r) && n > 0; ++i)
        if (r.blocks[kWindowed][i]->owners == 1) bytes -= pools_[kWindowed].bytes(1);
    return bytes;
}

int64_t KV::exclusive(const std::vector<int>& rows) const {
    std::vector<int> unique = rows;
    std::sort(unique.begin(), unique.end());
    unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
    int64_t bytes = recurrent() ? states_.exclusive(unique) : 0;
    std::unordered_map<const Block*, int> seen;
    for (size_t pool = 0; pool < kPools; ++pool)
        for (const int row : unique)
            for (const Block* block : at(row).blocks[pool])
                if (block && ++seen[block] == block->owners) bytes += pools_[pool].bytes(1);
    return bytes;
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
    drop_kept_if([&](const Kept& kept) { return kept.row == row; });
    r.used = false;
}

int KV::reachable(int row, int n) const {
    if (at(row).awaits) return 0;
    int most = std::min(std::max(n, 0), at(row).length);
    for (;;) {
        const int found = within_windows(row, recurrent() ? states_.reachable(row, most) : most);
        if (found == most) return most;
        most = found;
    }
}

// The longest beginning of at most n positions behind which a token's windows are there.
int KV::within_windows(int row, int n) const {
    if (has_window(at(row), n)) return n;
    const auto kept = kept_at(row, n);
    return kept == kept_.end() ? 0 : kept->end;
}

// The longest kept beginning of at most n positions.
std::deque<KV::Kept>::const_iterator KV::kept_at(int row, int n) const {
    auto best = kept_.end();
    for (auto each = kept_.begin(); each != kept_.end(); ++each)
        if (each->row == row && each->end <= n && (best == kept_.end() || each->end > best->end)) best = each;
    return best;
}

template <class F>
void KV::drop_kept_if(const F& f) {
    for (const Kept& kept : kept_)
        if (f(kept))
            for (Block* block : kept.blocks) pools_[kWindowed].drop(block);
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), f), kept_.end());
}

bool KV::drop_kept() {
    if (kept_.empty()) return false;
    for (Block* block : kept_.front().blocks) pools_[kWindowed].drop(block);
    kept_.pop_front();
    return true;
}

void KV::keep(int row) {
    states_.keep(row);
    keep_windows(row);
}

void KV::keep_windows(int row) {
    const Row& r = at(row);
    if (!windowed() || r.length == 0 || !has_window(r, r.length)) return;
    const std::vector<Block*>& blocks = r.blocks[kWindowed];
    Kept kept{row, r.length, first_seen(r.length), {}};
    if (const auto there = kept_at(row, r.length); there != kept_.end() && there->end == r.length) return;
    kept.blocks.assign(blocks.begin() + static_cast<std::ptrdiff_t>(kept.first), blocks.end());
    kept_.push_back(std::move(kept));
    for (size_t i = kept_.back().first; i < blocks.size(); ++i)
        pools_[kWindowed].keep(blocks[i], std::min(kBlock, r.length - static_cast<int>(i) * kBlock));
}

// n, if the row can be cut or forked there.
int KV::checked(int row, int n, const char* what) const {
    if (n > 0 && reachable(row, n) != n)
        throw std::invalid_argument(std::string("cannot ") + what + " " + std::to_string(n) + " of " + std::to_string(at(row).length) +
                                    " positions of KV row " + std::to_string(row) + ": its " +
                                    (has_window(at(row), n) ? "recurrent layers" : "windows") +
                                    " have passed them; `reachable` says what can be had");
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
    if (n > 0 && !has_window(r, n)) {
        const auto kept = kept_at(row, n);
        for (Block* block : kept->blocks) pools_[kWindowed].own(block);
        for (size_t i = r.first; i < r.blocks[kWindowed].size(); ++i) pools_[kWindowed].give(r.blocks[kWindowed][i]);
        r.first = kept->first;
        r.blocks[kWindowed].assign(r.first, nullptr);
        r.blocks[kWindowed].insert(r.blocks[kWindowed].end(), kept->blocks.begin(), kept->blocks.end());
    }
    drop_kept_if([&](const Kept& kept) { return kept.row == row && kept.end > n; });
    shrink(r, n);
}

void KV::shrink(Row& row, int n) {
    row.length = n;
    for (int pool = 0; pool < kPools; ++pool) {
        std::vector<Block*>& blocks = row.blocks[static_cast<size_t>(pool)];
        for (size_t i = blocks_for(pool, n); i < blocks.size(); ++i)
            if (blocks[i]) pools_[static_cast<size_t>(pool)].give(blocks[i]);
        blocks.resize(blocks_for(pool, n));
    }
    if (n == 0) row.first = 0;
}

// Gives back what no window of the row's next tokens reaches, nor of the kBehind tokens before them.
void KV::pass(Row& row) {
    for (const size_t end = first_left(row); row.first < end; ++row.first)
        pools_[kWindowed].give(std::exchange(row.blocks[kWindowed][row.first], nullptr));
}

void KV::settle() {
    for (size_t i = 0; i < rows_.size(); ++i) {
        Row& row = rows_[i];
        if (const int at = static_cast<int>(i); recurrent() && row.used && !row.awaits && states_.length(at) != row.length) {
            states_.clear(at);  // the forward had gone over some of its tokens
            drop_kept_if([&](const Kept& kept) { return kept.row == at; });
            row.length = 0;
        }
        shrink(row, row.length);
    }
}

// Makes room for so many blocks of each pool, which pools_ then has: or throws MemoryLimit, std::bad_alloc.
void KV::reserve(const Counts& counts, const char* what, int64_t beside) {
    const auto spared = [&](size_t pool) { return pools_[pool].spare(); };
    int64_t need = beside, fresh = 0;  // in blocks: of those that have no memory yet
    for (size_t pool = 0; pool < kPools; ++pool) {
        need += pools_[pool].bytes(counts[pool]);
        fresh += pools_[pool].bytes(counts[pool] - std::min(counts[pool], spared(pool)));
    }
    if (limit_ >= 0 && bytes() + need > limit_)
        throw MemoryLimit(std::string(what) + " takes " + std::to_string(need) + " bytes of KV memory, but only " +
                          std::to_string(limit_ - bytes()) + " of " + std::to_string(limit_) +
                          " are free: shorten the requests, run fewer at once or raise kv_memory");
    const auto taken = [&] { return bytes() + states_.snapshot_bytes(false) + pools_[kWindowed].kept(); };
    while (limit_ >= 0 && taken() + need > limit_ && (states_.drop_snapshot() || drop_kept())) {}
    const size_t window = static_cast<size_t>(shape_.window / kBlock + 1);
    while (pools_[kWindowed].kept() > pools_[kWindowed].bytes(kKeptWindows * window) && drop_kept()) {}
    for (size_t pool = 0; pool < kPools; ++pool)  // what one pool has spare, the other may need
        while (limit_ >= 0 && held_in_blocks() + fresh > limit_ && spared(pool) > counts[pool]) pools_[pool].discard();
    for (size_t pool = 0; pool < kPools; ++pool)
        if (counts[pool] > 0)
            pools_[pool].reserve(
                counts[pool], limit_ < 0 ? std::numeric_limits<size_t>::max() : static_cast<size_t>(limit_) / pools_[pool].size());
}

// A block that the row shares gives way to the row's own copy of it. Whole blocks: what lies beyond is never read.
void KV::copy(Row& row, int pool, size_t i) {
    KVBlocks& blocks = pools_[static_cast<size_t>(pool)];
    Block*& at = row.blocks[static_cast<size_t>(pool)][i];
    Block* own = blocks.take();
    std::memcpy(own->data, at->data, blocks.size());
    blocks.give(at);
    at = own;
}

void KV::grow(const std::vector<Need>& needs) {
    for (const auto& [row, n, _] : needs) {
        if (n < 0 || n > std::numeric_limits<int>::max() - at(row).length)
            throw std::invalid_argument("KV row " + std::to_string(row) + " cannot grow by " + std::to_string(n) + " positions");
        if (at(row).awaits)
            throw std::invalid_argument(
                "KV row " + std::to_string(row) + " has not taken its " + (recurrent() ? "recurrent state" : "window") + " yet");
    }
    Counts count{};
    int64_t beside = 0;
    std::unordered_map<const Block*, int> left;  // owners of a shared last block that have not copied it
    std::vector<std::pair<Row*, int>> copies;    // and the pool
    for (const auto& [row, n, settled] : needs) {
        Row& r = at(row);
        if (n > 0) pass(r);
        if (recurrent()) beside += states_.growth(row, n, settled);
        for (int pool = 0; pool < kPools; ++pool) {
            std::vector<Block*>& blocks = r.blocks[static_cast<size_t>(pool)];
            const size_t all = blocks_for(pool, r.length + n);
            count[static_cast<size_t>(pool)] += all - blocks.size();
            blocks.reserve(all);
            if (n == 0 || r.length % kBlock == 0 || blocks.empty() || !blocks.back()->shared(r.length % kBlock)) continue;
            int& others = left.emplace(blocks.back(), blocks.back()->owners).first->second;
            if (others-- > 1 || blocks.back()->kept > r.length % kBlock) {  // else the last owner may write where it is
                copies.emplace_back(&r, pool);
                ++count[static_cast<size_t>(pool)];
            }
        }
    }
    reserve(count, "this forward", beside);
    for (const auto& [row, pool] : copies) copy(*row, pool, row->blocks[static_cast<size_t>(pool)].size() - 1);
    for (const auto& [row, n, _] : needs) {
        Row& r = at(row);
        for (int pool = 0; pool < kPools; ++pool)
            for (std::vector<Block*>& blocks = r.blocks[static_cast<size_t>(pool)]; blocks.size() < blocks_for(pool, r.length + n);)
                blocks.push_back(pools_[static_cast<size_t>(pool)].take());
    }
}

// Calls f(part's offset, piece's offset in it, bytes) for whatever a slot has in a pool's block, layer by layer and head by head.
// A key is spread over its tile of 16 slots: pairs of bf16, single numbers of other types, one place of each 16; integers, of
// values too, as integer_at says.
template <class F>
void KV::each_piece(int pool, int slot, const F& f) const {
    const KVType type = shape_.type;
    const size_t piece = type == KVType::BF16 ? 4 : static_cast<size_t>(element_bytes(type)), at = static_cast<size_t>(slot);
    const auto each_integer = [&](bool key, size_t part, int dim) {
        const int row = kv_row_bytes(type, dim), scale = scale_bytes(type);
        for (int i = 0; i < row; ++i) f(part, integer_at(key, slot, i, row), size_t{1});
        for (int g = 0; g < groups(type, dim); ++g)
            f(part, static_cast<size_t>(kBlock * row + scale * (g * kBlock + slot)), static_cast<size_t>(scale));
    };
    for (int layer = 0; layer < static_cast<int>(shape_.layers.size()); ++layer) {
        if (shape_[layer].pool != pool) continue;
        const int dim = shape_[layer].dim_padded(), value_dim = shape_[layer].value_padded();
        const size_t row = static_cast<size_t>(kv_row_bytes(type, dim)), value_row = static_cast<size_t>(kv_row_bytes(type, value_dim));
        for (int head = 0; head < shape_[layer].heads; ++head) {
            const size_t keys = shape_.keys(layer, head), values = shape_.values(layer, head);
            if (integers(type)) {
                each_integer(true, keys, dim);
                each_integer(false, values, value_dim);
                continue;
            }
            for (size_t i = 0; i < row / piece; ++i) f(keys, at / 16 * 16 * row + (16 * i + at % 16) * piece, piece);
            f(values, at * value_row, value_row);
        }
    }
}

void KV::move_slot(Row& row, int from, int to) {
    for (int pool = 0; pool < kPools; ++pool) {
        const std::vector<Block*>& blocks = row.blocks[static_cast<size_t>(pool)];
        if (blocks.empty()) continue;
        const uint8_t* src = blocks[static_cast<size_t>(from / kBlock)]->data;
        uint8_t* dst = blocks[static_cast<size_t>(to / kBlock)]->data;
        std::vector<size_t> places;
        each_piece(pool, from % kBlock, [&](size_t part, size_t at, size_t) { places.push_back(part + at); });
        auto place = places.begin();
        each_piece(pool, to % kBlock, [&](size_t part, size_t at, size_t bytes) { std::memcpy(dst + part + at, src + *place++, bytes); });
    }
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
    checked(row, start, "compact from");
    std::vector<std::pair<int, size_t>> shared;  // pool, block
    Counts count{};
    for (int pool = 0; pool < kPools && first < n; ++pool)
        for (size_t b = static_cast<size_t>((start + first) / kBlock); b < blocks_for(pool, start + n); ++b) {
            const int slot = std::max(start + first - static_cast<int>(b) * kBlock, 0);
            if (!r.blocks[static_cast<size_t>(pool)][b]->shared(slot)) continue;
            shared.emplace_back(pool, b);
            ++count[static_cast<size_t>(pool)];
        }
    reserve(count, "keeping a part of what is shared");
    for (const auto& [pool, b] : shared) copy(r, pool, b);
    for (int i = first; i < n; ++i) move_slot(r, start + keep[i], start + i);
    if (recurrent()) states_.compact(row, start, keep, n);
    drop_kept_if([&](const Kept& kept) { return kept.row == row && kept.end > start; });
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
        const auto taken = [&] { return bytes() + states_.snapshot_bytes(false) + pools_[kWindowed].kept(); };
        while (taken() + states_.fork_bytes(src, n) > limit_ && states_.drop_snapshot()) {}
        if (checked(src, n, "fork"); bytes() + states_.fork_bytes(src, n) > limit_)
            throw MemoryLimit("a beginning that is shared takes " + std::to_string(states_.fork_bytes(src, n)) +
                              " bytes of KV memory, but only " + std::to_string(limit_ - bytes()) + " of " + std::to_string(limit_) +
                              " are free: run fewer at once or raise kv_memory");
    }
    if (recurrent()) states_.fork(src, dst, n);
    const auto begin = from.blocks[kFull].begin();
    to.blocks[kFull].assign(begin, begin + static_cast<std::ptrdiff_t>(blocks_for(kFull, n)));
    if (n > 0 && !has_window(from, n)) {
        const auto kept = kept_at(src, n);
        to.blocks[kWindowed].assign(kept->first, nullptr);
        to.blocks[kWindowed].insert(to.blocks[kWindowed].end(), kept->blocks.begin(), kept->blocks.end());
        to.first = kept->first;
    } else if (n > 0 && windowed()) {
        const auto first = from.blocks[kWindowed].begin();
        to.blocks[kWindowed].assign(first, first + static_cast<std::ptrdiff_t>(blocks_for(kWindowed, n)));
        to.first = from.first;
    }
    for (size_t pool = 0; pool < kPools; ++pool)
        for (Block* block : to.blocks[pool])
            if (block) pools_[pool].own(block);
    to.length = n;
    keep_windows(dst);  // who begins like it may, too
}

bool KV::export_block(int row, int pool, int i, uint8_t* to) const {
    const int blocks = (at(row).length + kBlock - 1) / kBlock;
    if (i < 0 || i >= blocks)
        throw std::invalid_argument(
            "KV row " + std::to_string(row) + " has " + std::to_string(blocks) + " blocks, and none " + std::to_string(i));
    const size_t size = shape_.block[static_cast<size_t>(pool)];
    const uint8_t* block = size > 0 ? block_of(row, pool, i) : nullptr;
    if (!block) return size == 0;
    std::memcpy(to, block, size);
    for (int slot = std::min(kBlock, length(row) - i * kBlock); slot < kBlock; ++slot)
        each_piece(pool, slot, [&](size_t part, size_t at, size_t bytes) { std::memset(to + part + at, 0, bytes); });
    return true;
}

void KV::import_block(int row, const uint8_t* from, const uint8_t* window, int n) {
    Row& r = at(row);
    if (n < 1 || n > kBlock || r.length % kBlock != 0 || (recurrent() && r.length > 0 && !r.awaits))
        throw std::invalid_argument(
            "KV row " + std::to_string(row) + " of length " + std::to_string(r.length) + " cannot take a block of " + std::to_string(n));
    const std::array<const uint8_t*, kPools> data{from, window};
    Counts count{};
    for (size_t pool = 0; pool < kPools; ++pool) {
        count[pool] = data[pool] ? blocks_for(static_cast<int>(pool), n) : 0;
        r.blocks[pool].reserve(r.blocks[pool].size() + 1);
    }
    reserve(count, "a beginning that a file has");
    std::vector<Block*>& seen = r.blocks[kWindowed];
    if (windowed() && !window) {
        for (; r.first < seen.size(); ++r.first) pools_[kWindowed].give(std::exchange(seen[r.first], nullptr));
        seen.push_back(nullptr);
        ++r.first;
    }
    for (size_t pool = 0; pool < kPools; ++pool)
        if (count[pool] > 0) {
            Block* block = pools_[pool].take();
            std::memcpy(block->data, data[pool], pools_[pool].size());
            r.blocks[pool].push_back(block);
        }
    r.length += n;
    r.awaits = recurrent() || !has_window(r, r.length);
}

void KV::import_state(int row, const float* from) {
    Row& r = at(row);
    if (!r.awaits || !recurrent()) throw std::invalid_argument("KV row " + std::to_string(row) + " awaits no recurrent state");
    reserve({}, "a recurrent state", states_.bytes_for(r.length));
    states_.take(row, r.length, from);
    r.awaits = !has_window(r, r.length);
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
    std::array<std::unordered_map<const Block*, int>, kPools> owners;
    std::unordered_map<const Block*, int> keepers;
    std::unordered_map<const Block*, size_t> places;
    const auto found = [&](const Block* block, size_t place) {
        require(places.emplace(block, place).first->second == place, "a KV block stands at two places");
    };
    for (const Row& row : rows_) {
        require(row.used || row.length == 0, "a freed KV row still has positions");
        require(row.length >= 0 && (row.awaits || has_window(row, row.length)), "a KV row's windows are not there");
        if (recurrent() && row.used && !row.awaits) states_.check(static_cast<int>(&row - rows_.data()), row.length);
        for (int pool = 0; pool < kPools; ++pool) {
            const std::vector<Block*>& blocks = row.blocks[static_cast<size_t>(pool)];
            require(blocks.size() == blocks_for(pool, row.length), "a KV row's blocks do not fit its length");
            for (size_t i = 0; i < blocks.size(); ++i) {
                require((blocks[i] == nullptr) == (pool == kWindowed && i < row.first), "a KV row lacks a block");
                if (!blocks[i]) continue;
                ++owners[static_cast<size_t>(pool)][blocks[i]];
                found(blocks[i], i);
            }
        }
    }
    for (const Kept& kept : kept_) {
        require(at(kept.row).length >= kept.end && kept.first + kept.blocks.size() == blocks_for(kWindowed, kept.end),
            "a kept beginning does not fit its row");
        for (size_t i = 0; i < kept.blocks.size(); ++i) {
            ++keepers[kept.blocks[i]];
            found(kept.blocks[i], kept.first + i);
        }
    }
    pools_[kFull].check(owners[kFull], {});
    pools_[kWindowed].check(owners[kWindowed], keepers);
    require(limit_ < 0 || (recurrent() ? bytes() + states_.snapshot_bytes(true) + pools_[kWindowed].kept() : held_in_blocks()) <= limit_,
        "more KV memory is taken than allowed");
}

void KV::poison() {
    std::unordered_map<const Block*, int> used;  // slots of a block that its longest owner uses
    for (const Row& row : rows_)
        for (const std::vector<Block*>& blocks : row.blocks)
            for (size_t i = 0; i < blocks.size(); ++i) {
                int& slots = used[blocks[i]];
                slots = std::max(slots, std::min(kBlock, row.length - static_cast<int>(i) * kBlock));
            }
    for (int pool = 0; pool < kPools; ++pool)
        for (const std::unique_ptr<Block>& block : pools_[static_cast<size_t>(pool)].all())
            for (int slot = std::max(used.count(block.get()) ? used[block.get()] : 0, block->kept); slot < kBlock; ++slot)
                each_piece(pool, slot, [&](size_t part, size_t at, size_t bytes) { std::memset(block->data + part + at, 0xFF, bytes); });
}

}  // namespace outpace
