// Unit tests of what has no Python beside it: how a pool cuts work and meets, and how rows share KV blocks.
// tests/native/test_cpp.py builds and runs this; a failure prints its line and ends with status 1.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "runtime/kv.h"
#include "runtime/pool.h"

using namespace outpace;

namespace {

int failures = 0;

void expect(bool holds, const char* what, int line) {
    if (holds) return;
    ++failures;
    std::printf("run.cpp:%d: %s does not hold\n", line, what);
}
#define EXPECT(...) expect((__VA_ARGS__), #__VA_ARGS__, __LINE__)

void parts_cover_the_work_once() {
    for (int total = 0; total < 40; ++total)
        for (int count = 1; count < 9; ++count) {
            int next = 0;
            for (int rank = 0; rank < count; ++rank) {
                const Part part = part_of(total, rank, count);
                EXPECT(part.begin == next && part.end >= part.begin && part.end - part.begin <= total / count + 1);
                next = part.end;
            }
            EXPECT(next == total);
        }
    EXPECT(part_of(2000000000, 6, 7).end == 2000000000);  // without overflow
}

// Every phase adds what the phase before it wrote: a thread that passes a barrier early would read too little.
void threads_meet_between_phases() {
    constexpr int kWidth = 64, kPhases = 200;
    for (const int threads : {1, 2, 3}) {
        Pool pool(threads);
        for (int run = 0; run < 5; ++run) {
            std::vector<long> now(kWidth, 1), before(kWidth);
            std::atomic<int> dismissed{0};
            const int ended = pool.run([&](Seat& seat) {
                for (int phase = 0; phase < kPhases; ++phase) {
                    const Part copied = seat.of(kWidth);
                    for (int i = copied.begin; i < copied.end; ++i) before[i] = now[i];
                    if (!pool.meet(seat)) return void(++dismissed);
                    const Part added = seat.of(kWidth);
                    for (int i = added.begin; i < added.end; ++i) now[i] = (before[i] + before[kWidth - 1 - i]) % 1000003;
                    if (!pool.meet(seat)) return void(++dismissed);
                }
            });
            long expected = 1;
            for (int phase = 0; phase < kPhases; ++phase) expected = 2 * expected % 1000003;
            for (const long value : now) EXPECT(value == expected);
            EXPECT(ended >= 1 && ended + dismissed <= pool.size());
        }
    }
}

KVShape shape() { return {2, 2, 16, KVType::F32}; }

int row_of(KV& kv, int length) {
    const int row = kv.alloc();
    kv.grow({{row, length}});
    kv.lengthen(row, length);
    return row;
}

void rows_share_blocks_until_one_writes() {
    KV kv(shape(), -1);
    const int64_t block = static_cast<int64_t>(shape().block());
    const int first = row_of(kv, 100);  // a whole block, and 36 positions of a second
    EXPECT(kv.bytes() == 2 * block);
    const int second = kv.alloc();
    kv.fork(first, second, 100);
    EXPECT(kv.bytes() == 2 * block && kv.length(second) == 100);
    EXPECT(kv.exclusive({second}) == 0 && kv.exclusive({first, second}) == 2 * block);
    EXPECT(kv.growth(second, 1) == block);  // the copy of the second block
    std::memset(const_cast<uint8_t*>(kv.block_of(first, 1)), 7, shape().block());
    kv.grow({{second, 1}});
    kv.lengthen(second, 1);
    kv.check();
    EXPECT(kv.block_of(first, 0) == kv.block_of(second, 0) && kv.block_of(first, 1) != kv.block_of(second, 1));
    EXPECT(std::memcmp(kv.block_of(first, 1), kv.block_of(second, 1), 36 * 4) == 0);
    kv.free(first);
    kv.check();
    EXPECT(kv.bytes() == 2 * block && kv.length(second) == 101);
    kv.truncate(second, 64);
    EXPECT(kv.bytes() == block && kv.held() >= kv.bytes());
    kv.free(second);
    EXPECT(kv.bytes() == 0 && kv.rows().empty());
}

void memory_that_is_short_changes_nothing() {
    const int64_t block = static_cast<int64_t>(shape().block());
    KV kv(shape(), 3 * block);
    const int first = row_of(kv, 64), second = row_of(kv, 64);
    bool refused = false;
    try {
        kv.grow({{first, 1}, {second, 1}});  // one of the two would fit
    } catch (const MemoryLimit&) { refused = true; }
    kv.check();
    EXPECT(refused && kv.bytes() == 2 * block && kv.blocks_of(first) == 1 && kv.blocks_of(second) == 1);
    kv.grow({{second, 64}});
    kv.settle();  // the forward failed: nothing was written
    EXPECT(kv.bytes() == 2 * block && kv.length(second) == 64);
}

}  // namespace

int main() {
    parts_cover_the_work_once();
    threads_meet_between_phases();
    rows_share_blocks_until_one_writes();
    memory_that_is_short_changes_nothing();
    std::printf("%d failures\n", failures);
    return failures > 0;
}
