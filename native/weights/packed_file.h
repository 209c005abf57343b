// Packed weights in a file: mapped read-only, so that processes share them, and checked before they are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "weights/pack.h"

namespace outpace {

// A mapping of a whole file. It begins on a huge page's boundary, so that where the system holds the file in huge pages
// they are mapped as such. The file may be renamed or deleted meanwhile, never shortened.
class PackedFile {
public:
    // `file` is a descriptor, which may be closed afterwards. Throws std::system_error, and std::invalid_argument where the
    // file is not of so many bytes.
    PackedFile(int file, size_t bytes);
    ~PackedFile();
    PackedFile(const PackedFile&) = delete;
    PackedFile& operator=(const PackedFile&) = delete;

    const uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

    // The share of what is in memory that the system maps in huge pages; 0 where it does not tell.
    double huge() const;

    // Moves the contents, with so many threads, into memory of this process alone, in huge pages where there are any.
    // Before any matrix is taken from it. Throws std::bad_alloc.
    void copy(int threads);

    // Of each `piece` bytes from `begin` on (the last one may be shorter), read in by so many threads. Throws
    // std::system_error where the disk fails to give them.
    std::vector<uint64_t> checksums(size_t begin, size_t piece, int threads) const;

private:
    const uint8_t* data_;
    const size_t bytes_;
};

// 64 bits; any change within an aligned word of 8 bytes changes it. About as fast as memory.
uint64_t checksum(const uint8_t* data, size_t bytes);

// What `pack` would make of such a matrix, from `offset` of the file on; it keeps the mapping. Throws
// std::invalid_argument where that is not within the file.
Matrix matrix_at(std::shared_ptr<const PackedFile> file, size_t offset, int source, int rows, int cols, Target target);

// Whether row `row` of `m` has the very values that packing `stored`, a row of the model's file, would give it.
bool row_is(const Matrix& m, int row, const uint8_t* stored, int source, Target target);

}  // namespace outpace
