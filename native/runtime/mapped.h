// Files that are read in place, and may shrink while they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace outpace {

// A file's bytes, mapped read-only. Where the system takes a page away (the file was cut short, its disk failed), the
// access does not end the process with SIGBUS: what is gone reads as zeros from then on, and `torn` says so.
class Mapped {
public:
    // Throws std::system_error.
    explicit Mapped(const std::string& path);
    ~Mapped();
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;

    const uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    bool torn() const;

    // Takes the signal's handler back, should somebody have set another one since. Call it before a run of reads.
    static void guard();

    struct Range;

private:
    const uint8_t* data_ = nullptr;
    size_t size_ = 0;
    Range* range_ = nullptr;
};

}  // namespace outpace
