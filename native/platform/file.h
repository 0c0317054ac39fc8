// A file without a name, read and written at offsets.
#pragma once

#include "../ops/row-file.h"

#include <cstddef>
#include <cstdint>
#include <string>

// No other process can open it, and it is gone when it is closed, however the process ends. Any thread may read and
// write. A call that fails returns false, with the reason in why; a reason is empty when the file ended too early.
class lctx_unnamed_file {
  public:
    // Throws lctx_refusal with the reason.
    explicit lctx_unnamed_file(const std::string & folder);
    lctx_unnamed_file(const lctx_unnamed_file &) = delete;
    lctx_unnamed_file & operator=(const lctx_unnamed_file &) = delete;
    ~lctx_unnamed_file();

    // Bytes that its disk has for this user; 0 when it does not say.
    uint64_t free_bytes() const;
    uint64_t size() const;
    // Set the size; what was never written is zeros, and takes no room where the file system has holes.
    bool resize(uint64_t size, std::string & why);
    // Have room on the disk for bytes [from, from + n); true too where the system cannot: then writing shows it.
    bool reserve(uint64_t from, uint64_t n, std::string & why);
    // Give the room of these bytes back, where the system can; they are zeros then.
    void give_back(uint64_t from, uint64_t n);

    // Read n bytes; after an error, those that are missing are zeros.
    bool read(uint64_t from, void * to, size_t n, std::string & why) const;
    bool write(uint64_t from, const void * data, size_t n, std::string & why);
    // Read what lies together into n <= lctx_row_file::MOST_TARGETS parts in one call, where the system has one.
    // Without `wait`, false unless all of it is in the system's memory, which then begins to fetch it; only Linux says.
    bool read_parts(uint64_t from, const lctx_row_target * parts, int n, bool wait, std::string & why) const;

  private:
#ifdef _WIN32
    void * file_ = nullptr;
#else
    int file_ = -1;
#endif
};
