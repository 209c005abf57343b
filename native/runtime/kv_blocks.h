// KV blocks of one size: who has each of them, and which are spare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "runtime/kv_arena.h"

namespace outpace {

struct KVBlock {
    uint8_t* data;
    int owners = 0;   // rows that have it
    int keepers = 0;  // kept beginnings (KV::keep) that need it; without either it is spare
    int kept = 0;     // slots that those need
    // Whether a row that has it must copy it before it writes slots from this one on.
    bool shared(int slot) const { return owners > 1 || kept > slot; }
};

// Spare blocks are kept for the next row, never more than were once in use. Not thread-safe.
class KVBlocks {
public:
    explicit KVBlocks(size_t size) : size_(size), arena_(size) {}  // bytes of a block; 0: there are none

    size_t size() const { return size_; }
    int64_t bytes(size_t blocks) const { return static_cast<int64_t>(blocks * size_); }
    int64_t used() const { return bytes(used_); }      // of blocks that rows have
    int64_t kept() const { return bytes(kept_); }      // of those that kept beginnings alone have
    size_t spare() const { return spare_.size(); }
    int64_t held() const { return bytes(all_.size() - empty_.size()); }  // used, kept or spare

    // Makes so many blocks ready for `take`, which cannot fail then; `most`: how many there may be in all. Throws std::bad_alloc.
    void reserve(size_t count, size_t most);
    KVBlock* take();  // with one owner
    void own(KVBlock* block);
    void give(KVBlock* block) noexcept;
    void keep(KVBlock* block, int slots);
    void drop(KVBlock* block) noexcept;
    // Gives a spare block's memory back to the system; false: there is none.
    bool discard();

    const std::vector<std::unique_ptr<KVBlock>>& all() const { return all_; }
    // Whether the counts are those of blocks with so many owners and keepers. Throws std::logic_error.
    void check(const std::unordered_map<const KVBlock*, int>& owners, const std::unordered_map<const KVBlock*, int>& keepers) const;

private:
    const size_t size_;
    KVArena arena_;
    size_t used_ = 0, kept_ = 0;
    std::vector<std::unique_ptr<KVBlock>> all_;
    std::vector<KVBlock*> spare_, empty_;  // nobody's: with memory, and without
};

}  // namespace outpace
