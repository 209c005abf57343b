// Unit tests of what has no Python beside it: how a pool cuts work and meets, and where a draft stops growing.
// tests/native/test_cpp.py builds and runs this; a failure prints its line and ends with status 1.
#include <cstdio>
#include <utility>
#include <vector>

#include "model/grow.h"
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
            const int ended = pool.run([&](Seat& seat) {
                for (int phase = 0; phase < kPhases; ++phase) {
                    const Part copied = seat.of(kWidth);
                    for (int i = copied.begin; i < copied.end; ++i) before[i] = now[i];
                    if (!pool.meet(seat)) return;  // dismissed: the run may be over
                    const Part added = seat.of(kWidth);
                    for (int i = added.begin; i < added.end; ++i) now[i] = (before[i] + before[kWidth - 1 - i]) % 1000003;
                    if (!pool.meet(seat)) return;  // dismissed: the run may be over
                }
            });
            long expected = 1;
            for (int phase = 0; phase < kPhases; ++phase) expected = 2 * expected % 1000003;
            for (const long value : now) EXPECT(value == expected);
            EXPECT(ended >= 1 && ended <= pool.size());
        }
    }
}

// A path whose chance is less than the floor has no children, though it is in the draft; what is above goes on.
void drafts_stop_at_their_floor() {
    const auto grown = [](double floor) {
        Growth growth(16, 8, 2, floor);
        growth.grow({{{0, 10, 0.7}, {1, 11, 0.3}}});
        std::vector<int> asked;
        while (asked.size() < 3) {
            const std::vector<int> parents = growth.expand();
            if (parents.empty()) break;
            asked.push_back(static_cast<int>(parents.size()));
            growth.grow(std::vector<std::vector<RankedToken>>(parents.size(), {{2, 12, 0.8}, {3, 13, 0.1}}));
        }
        return std::make_pair(asked, growth);
    };
    const auto [all, whole] = grown(0.0);
    EXPECT(all == std::vector<int>{2, 2, 2} && whole.depth() == 4 && whole.likeliest().size() == 14);
    const auto [few, cut] = grown(0.5);  // 0.7, 0.56, 0.448
    EXPECT(few == std::vector<int>{1, 1} && cut.depth() == 3 && cut.likeliest().size() == 6);
    EXPECT(grown(0.9).first.empty());
}

}  // namespace

int main() {
    parts_cover_the_work_once();
    threads_meet_between_phases();
    drafts_stop_at_their_floor();
    std::printf("%d failures\n", failures);
    return failures > 0;
}
