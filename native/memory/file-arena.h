// Memory of a store that is a file: rows that are seldom read lie on a disk.
#pragma once

#include "../ops/row-file.h"
#include "../platform/file.h"
#include "arena.h"

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

// A file without a name: it is gone when it is closed, however the process ends, and no other process can open it.
// Its addresses are reserved and cannot be touched; ggml's functions for tensors read and write the file. Units that
// have the same number in its tensors lie side by side there, so that they are read together.
class lctx_file_arena final : public lctx_arena, public lctx_row_file {
  public:
    // Says where a tensor begins among the addresses, and the bytes of its units.
    struct part {
        size_t first, unit;
    };

    // parts: ascending, with equal numbers of units. Throws lctx_refusal if the folder cannot have such a file, or its
    // disk has less than `size` bytes free.
    lctx_file_arena(ggml_backend_buffer_type_t buft, const std::string & folder, size_t size,
                    const std::vector<part> & parts);
    ~lctx_file_arena() override;

    bool commits() const override { return true; }
    bool commit(size_t from, size_t end) override;
    void give_back(size_t from, size_t end) override;
    uint64_t committed() const override { return grains_.committed(); }

    bool read(const char * at, void * to, size_t size) override;
    bool write(char * at, const void * from, size_t size) override;
    bool read_units(const char * first, const lctx_row_target * targets, int n, bool wait) override;

    // Return the first error since the last call, and whether something else has cut the file; empty: none.
    std::string take_error();
    uint64_t n_read() const { return n_read_; }  // bytes
    uint64_t n_written() const { return n_written_; }
    double seconds() const { return (double)nanoseconds_ * 1e-9; }  // of all threads, waiting for the file
    char * data() const { return data_; }                           // addresses

  private:
    struct place {
        size_t at, n;  // in the file; bytes there until the unit ends
    };
    place place_of(size_t address) const;
    template <typename F> bool each_piece(const char * at, size_t size, F && f);
    bool fail(const char * what, const std::string & why);

    const std::string folder_;
    const std::vector<part> parts_;
    const size_t stripe_;  // bytes of a unit of all tensors
    const size_t size_;
    lctx_unnamed_file file_;
    char * data_ = nullptr;
    lctx_grains grains_;
    std::atomic<uint64_t> n_read_{0}, n_written_{0}, nanoseconds_{0};
    std::mutex mutex_;  // of the error
    std::string error_;
};
