#include "runtime/kv_arena.h"

#include <algorithm>
#include <new>
#include <utility>

#include "platform.h"

namespace outpace {
namespace {

constexpr size_t kHuge = size_t{2} << 20, kPage = 4096;
constexpr size_t kFirst = 8, kLargest = size_t{256} << 20;  // blocks; bytes

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

KVArena::~KVArena() {
    for (const Step& step : steps_) ::operator delete(step.data, std::align_val_t{step.align});
}

uint8_t* KVArena::take(size_t most) {
    if (left_ == 0) map(most);
    --left_;
    return std::exchange(next_, next_ + block_);
}

// Twice as much as the last time, within what can be needed; less where so much is not to be had.
void KVArena::map(size_t most) {
#ifdef __SANITIZE_ADDRESS__
    most = 1;  // so that a page's end is near a block's
#endif
    const size_t wish = steps_.empty() ? kFirst * block_ : std::min(2 * steps_.back().bytes, std::max(kLargest, block_));
    size_t blocks = std::max<size_t>(1, std::min(most, wish / block_));
    steps_.reserve(steps_.size() + 1);
    for (;; blocks /= 2) {
        const bool huge = blocks * block_ >= kHuge;
        const size_t align = huge ? kHuge : kPage, bytes = up(blocks * block_, align);
        try {
            steps_.push_back({::operator new(bytes, std::align_val_t{align}), bytes, align});
        } catch (const std::bad_alloc&) {
            if (blocks == 1) throw;
            continue;
        }
        if (huge) advise_huge(steps_.back().data, bytes);
        next_ = static_cast<uint8_t*>(steps_.back().data);
        left_ = std::min(most, bytes / block_);
        return;
    }
}

}  // namespace outpace
