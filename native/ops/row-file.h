// Rows that lie in a file while tensors give them addresses. Nothing reads or writes at such an address: kernels ask
// the file.
#pragma once

#include <cstddef>
#include <cstdint>

// Where bytes of a file go.
struct lctx_row_target {
    char * to;
    size_t size;
};

class lctx_row_file {
  public:
    static constexpr int MOST_TARGETS = 32;

    // Bytes from such an address on, and to it; any thread. False after an error, which the file keeps for the host.
    virtual bool read(const char * at, void * to, size_t size) = 0;
    virtual bool write(char * at, const void * from, size_t size) = 0;
    // Units that follow each other, from the one of this address on, in one call: of each its rows of every tensor
    // (staging.h). Without `wait` only what the system has in memory: else it begins to fetch them, and this is false
    // without an error.
    virtual bool read_units(const char * first, const lctx_row_target * targets, int n, bool wait) = 0;

  protected:
    ~lctx_row_file() = default;
};
