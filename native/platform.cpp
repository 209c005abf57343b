#include "platform.h"

#include <new>
#include <thread>

#if defined(_WIN32)
#ifndef NOMINMAX
#define NOMINMAX
#endif
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <pthread.h>
#include <sys/mman.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace outpace {

#if defined(_WIN32)

void* take_pages(size_t bytes) {
    void* pages = VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!pages) throw std::bad_alloc();
    return pages;
}
void give_pages(void* pages, size_t) noexcept { VirtualFree(pages, 0, MEM_RELEASE); }

void at_fork(void (*)(), void (*)(), void (*)()) {}

#else

void* take_pages(size_t bytes) {
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    advise_huge(pages, bytes);
    return pages;
}
void give_pages(void* pages, size_t bytes) noexcept { munmap(pages, bytes); }

void at_fork(void (*before)(), void (*in_parent)(), void (*in_child)()) { pthread_atfork(before, in_parent, in_child); }

#endif

void advise_huge(void* memory, size_t bytes) noexcept {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(memory, bytes, MADV_HUGEPAGE);
#else
    static_cast<void>(memory), static_cast<void>(bytes);
#endif
}

void discard_pages(void* memory, size_t bytes) noexcept {
#if defined(_WIN32)
    static_cast<void>(memory), static_cast<void>(bytes);
#else
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t begin = (at + page - 1) / page * page, end = (at + bytes) / page * page;
#if defined(__APPLE__)
    constexpr int advice = MADV_FREE;
#else
    constexpr int advice = MADV_DONTNEED;
#endif
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
#endif
}

#if defined(__linux__)

namespace {

// The processors that this thread may use, of 65,536 (a cpu_set_t has 1,024, which some systems refuse); none where the system
// does not say.
class Affinity {
public:
    Affinity() : known_(sched_getaffinity(0, sizeof set_, set_) == 0) {}
    int count() const { return known_ ? CPU_COUNT_S(sizeof set_, set_) : 0; }
    void remove(int processor) { CPU_CLR_S(static_cast<size_t>(processor), sizeof set_, set_); }
    // Where it may not, nothing is lost.
    void give(int thread) const { sched_setaffinity(thread, sizeof set_, set_); }

private:
    cpu_set_t set_[64]{};
    const bool known_;
};

}  // namespace

int allowed_processors() {
    if (const int allowed = Affinity().count()) return allowed;
    return static_cast<int>(std::thread::hardware_concurrency());
}
int current_processor() { return sched_getcpu(); }
int current_thread() { return static_cast<int>(syscall(SYS_gettid)); }

bool keep_off(int processor, int processors, const int* threads, size_t count) {
    Affinity others;
    if (others.count() != processors) return false;
    others.remove(processor);
    for (size_t i = 0; i < count; ++i) others.give(threads[i]);
    return true;
}

#else

int allowed_processors() { return static_cast<int>(std::thread::hardware_concurrency()); }
int current_processor() { return -1; }
int current_thread() { return 0; }
bool keep_off(int, int, const int*, size_t) { return false; }

#endif

#if defined(__x86_64__)

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r{0, 0, 0, 0};
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

uint64_t saved_states() {
    if (!(cpuid(1, 0).c >> 27 & 1)) return 0;  // OSXSAVE
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

#elif defined(__aarch64__)

ArmFeatures arm_features() {
#if defined(__linux__)
    return {(getauxval(AT_HWCAP) >> 20 & 1) != 0, (getauxval(AT_HWCAP2) >> 13 & 1) != 0};  // ASIMDDP, I8MM: asm/hwcap.h
#elif defined(__APPLE__)
    const auto has = [](const char* name) {
        int found = 0;
        size_t size = sizeof found;
        return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found != 0;
    };
    return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM")};
#else
    return {false, false};
#endif
}

#endif

}  // namespace outpace
