#include "runtime/kv_blocks.h"

#include <algorithm>
#include <stdexcept>

#include "platform.h"

namespace outpace {

void KVBlocks::reserve(size_t count, size_t most) {
    while (spare_.size() + empty_.size() < count) {
        all_.reserve(all_.size() < all_.capacity() ? 0 : std::max<size_t>(64, 2 * all_.size()));
        spare_.reserve(all_.capacity());  // `give` must not fail
        empty_.reserve(all_.capacity());
        auto block = std::make_unique<KVBlock>(KVBlock{nullptr});
        block->data = arena_.take(most - all_.size());
        empty_.push_back(block.get());
        all_.push_back(std::move(block));
    }
}

KVBlock* KVBlocks::take() {
    std::vector<KVBlock*>& from = spare_.empty() ? empty_ : spare_;
    KVBlock* block = from.back();
    from.pop_back();
    block->owners = 1;
    ++used_;
    return block;
}

void KVBlocks::own(KVBlock* block) {
    if (block->owners++ > 0) return;
    ++used_;
    --kept_;
}

void KVBlocks::give(KVBlock* block) noexcept {
    if (--block->owners > 0) return;
    --used_;
    if (block->keepers > 0)
        ++kept_;
    else
        spare_.push_back(block);
}

void KVBlocks::keep(KVBlock* block, int slots) {
    ++block->keepers;
    block->kept = std::max(block->kept, slots);
}

void KVBlocks::drop(KVBlock* block) noexcept {
    if (--block->keepers > 0) return;
    block->kept = 0;
    if (block->owners > 0) return;
    --kept_;
    spare_.push_back(block);
}

bool KVBlocks::discard() {
    if (spare_.empty()) return false;
    discard_pages(spare_.back()->data, size_);
    empty_.push_back(spare_.back());
    spare_.pop_back();
    return true;
}

void KVBlocks::check(const std::unordered_map<const KVBlock*, int>& owners, const std::unordered_map<const KVBlock*, int>& keepers) const {
    const auto require = [](bool holds, const char* what) {
        if (!holds) throw std::logic_error(what);
    };
    const auto count = [](const std::unordered_map<const KVBlock*, int>& in, const KVBlock* block) {
        const auto found = in.find(block);
        return found == in.end() ? 0 : found->second;
    };
    size_t used = 0, kept = 0;
    for (const std::unique_ptr<KVBlock>& block : all_) {
        require(block->owners == count(owners, block.get()), "a KV block's owners are miscounted");
        require(block->keepers == count(keepers, block.get()), "a KV block's keepers are miscounted");
        used += block->owners > 0;
        kept += block->owners == 0 && block->keepers > 0;
    }
    require(used == used_ && kept == kept_, "the KV blocks in use do not add up");
    std::vector<const KVBlock*> idle(spare_.begin(), spare_.end());
    idle.insert(idle.end(), empty_.begin(), empty_.end());
    for (const KVBlock* block : idle) require(block->owners + block->keepers == 0, "a spare KV block has an owner");
    std::sort(idle.begin(), idle.end());
    require(std::adjacent_find(idle.begin(), idle.end()) == idle.end(), "a KV block is spare twice");
    require(idle.size() + used + kept == all_.size(), "KV blocks were lost");
}

}  // namespace outpace
