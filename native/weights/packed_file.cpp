#include "weights/packed_file.h"

#if !defined(_WIN32)
#include <sys/mman.h>
#include <sys/stat.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace outpace {

#if defined(_WIN32)  // models/native/weight_cache.py keeps nothing there

PackedFile::PackedFile(int, size_t bytes) : data_(nullptr), bytes_(bytes) {
    throw std::system_error(ENOSYS, std::generic_category(), "packed weights");
}
PackedFile::~PackedFile() = default;
double PackedFile::huge() const { return 0.0; }
void PackedFile::copy(int) {}
std::vector<uint64_t> PackedFile::checksums(size_t, size_t, int) const { return {}; }

#else

namespace {

constexpr size_t kHuge = size_t{2} << 20;

std::system_error failure(const char* what) { return {errno, std::generic_category(), what}; }

size_t whole(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

// Addresses for so many bytes that begin on a huge page's boundary: too many are taken, and the rest given back.
uint8_t* reserve(size_t bytes) {
    const size_t size = whole(bytes);
    void* raw = mmap(nullptr, size + kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw failure("mmap");
    uint8_t* const all = static_cast<uint8_t*>(raw);
    const size_t before = (kHuge - reinterpret_cast<uintptr_t>(raw) % kHuge) % kHuge;
    if (before > 0) munmap(all, before);
    munmap(all + before + size, kHuge - before);
    return all + before;
}

// Pages of [data, data + bytes) into memory and into the page table. 0, or the error that touching them would end in.
int bring_in(const uint8_t* data, size_t bytes) {
#if defined(__linux__)
    constexpr int populate_read = 22;  // MADV_POPULATE_READ, Linux 5.14: an error where a touch would be a signal
    if (madvise(const_cast<uint8_t*>(data), bytes, populate_read) != 0 && errno != EINVAL) return errno;
#endif
    return 0;
}

}  // namespace

PackedFile::PackedFile(int file, size_t bytes) : data_(nullptr), bytes_(bytes) {
    struct stat found;
    if (fstat(file, &found) != 0) throw failure("fstat");
    if (bytes == 0 || static_cast<uint64_t>(found.st_size) != bytes)
        throw std::invalid_argument("it has " + std::to_string(found.st_size) + " bytes instead of " + std::to_string(bytes));
    uint8_t* const reserved = reserve(bytes);
    void* mapped = mmap(reserved, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0);
    if (mapped == MAP_FAILED) {
        const std::system_error error = failure("mmap");
        munmap(reserved, whole(bytes));
        throw error;
    }
    data_ = static_cast<const uint8_t*>(mapped);
#ifdef MADV_HUGEPAGE
    madvise(mapped, bytes, MADV_HUGEPAGE);  // advice only: what is read from the disk comes in huge pages where it can
#endif
}

PackedFile::~PackedFile() { munmap(const_cast<uint8_t*>(data_), whole(bytes_)); }

std::vector<uint64_t> PackedFile::checksums(size_t begin, size_t piece, int threads) const {
    if (piece == 0 || begin % kHuge != 0 || begin > bytes_) throw std::invalid_argument("its pieces are out of range");
    std::vector<uint64_t> found((bytes_ - begin + piece - 1) / piece);
    std::atomic<int> failed{0};
    shared_out(found.size(), threads, [&](size_t i) {
        if (failed.load() != 0) return;
        const size_t at = begin + i * piece, size = std::min(piece, bytes_ - at);
        if (const int error = bring_in(data_ + at, size))
            failed.store(error);
        else
            found[i] = checksum(data_ + at, size);
    });
    if (failed.load() != 0) throw std::system_error(failed.load(), std::generic_category(), "reading it");
    return found;
}

double PackedFile::huge() const {
    std::ifstream maps("/proc/self/smaps");
    char first[20];
    std::snprintf(first, sizeof first, "%zx-", reinterpret_cast<size_t>(data_));
    double present = 0.0, pages = 0.0;
    bool ours = false;
    for (std::string line; std::getline(maps, line);) {
        if (line.rfind(first, 0) == 0) ours = true;
        if (!ours) continue;
        if (line.rfind("Rss:", 0) == 0) present = std::atof(line.c_str() + 4);
        if (line.rfind("FilePmdMapped:", 0) == 0) pages = std::atof(line.c_str() + 14);
        if (line.rfind("VmFlags:", 0) == 0) break;
    }
    return present > 0.0 ? pages / present : 0.0;
}

void PackedFile::copy(int threads) {
    uint8_t* const own = reserve(bytes_);
    if (mprotect(own, whole(bytes_), PROT_READ | PROT_WRITE) != 0) {
        munmap(own, whole(bytes_));
        throw std::bad_alloc();
    }
#ifdef MADV_HUGEPAGE
    madvise(own, whole(bytes_), MADV_HUGEPAGE);
#endif
    shared_out(whole(bytes_) / kHuge, threads,
        [&](size_t i) { std::memcpy(own + i * kHuge, data_ + i * kHuge, std::min(kHuge, bytes_ - i * kHuge)); });
    munmap(const_cast<uint8_t*>(data_), whole(bytes_));
    data_ = own;
}

#endif

uint64_t checksum(const uint8_t* data, size_t bytes) {
    // Eight chains, so that multiplications overlap. Each step is a bijection of the word and of what was before it.
    constexpr uint64_t odd = 0x9E3779B97F4A7C15u;
    const auto mixed = [](uint64_t h, uint64_t x) {
        h = (h ^ x) * odd;
        return h << 29 | h >> 35;
    };
    uint64_t h[8], words[8];
    for (uint64_t i = 0; i < 8; ++i) h[i] = odd * (i + 1);
    size_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
        std::memcpy(words, data + at, 64);
        for (int i = 0; i < 8; ++i) h[i] = mixed(h[i], words[i]);
    }
    std::memset(words, 0, 64);
    if (at < bytes) std::memcpy(words, data + at, bytes - at);
    for (int i = 0; i < 8; ++i) h[i] = mixed(h[i], words[i]);
    uint64_t all = static_cast<uint64_t>(bytes);
    for (const uint64_t lane : h) all = mixed(all, lane);
    all ^= all >> 32;
    all *= odd;
    return all ^ all >> 29;
}

}  // namespace outpace
