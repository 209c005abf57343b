// Memory for KV blocks: few large mappings, so that huge pages can back them, cut into blocks in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace outpace {

// A page that nobody has touched costs nothing, so a step may map far more than is in use: what is resident exceeds the
// blocks taken by less than one huge page a step. Blocks are given back together, by the destructor.
class KVArena {
public:
    explicit KVArena(size_t block) : block_(block) {}  // bytes of a block, a multiple of 64
    ~KVArena();
    KVArena(const KVArena&) = delete;
    KVArena& operator=(const KVArena&) = delete;

    // A block on a cache line's boundary that nothing has written yet; throws std::bad_alloc. `most`: how many more blocks
    // the caller may ever need, this one among them.
    uint8_t* take(size_t most);

private:
    struct Step {
        void* data;
        size_t bytes, align;
    };
    void map(size_t most);

    const size_t block_;
    std::vector<Step> steps_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;  // blocks of the last step
};

}  // namespace outpace
