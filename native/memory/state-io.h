// Bytes in memory as a state: read from there, counted, written there.
#pragma once

#include "llama-io.h"

#include <cstdint>
#include <string>
#include <vector>

struct llama_memory_i;

// Throws lctx_refusal unless ok.
void lctx_require_state(bool ok, const std::string & reason);

class lctx_state_reader final : public llama_io_read_i {
  public:
    lctx_state_reader(const uint8_t * data, size_t size) : data_(data), size_(size) {}

    // The next bytes where they lie. Throws lctx_refusal when there are fewer.
    const uint8_t * take(size_t size);
    bool at_end() const { return at_ == size_; }

    void read(void * dst, size_t size) override;
    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override;
    size_t n_bytes() override { return at_; }

  private:
    const uint8_t * data_;
    size_t size_, at_ = 0;
};

class lctx_state_counter final : public llama_io_write_i {
  public:
    void write(const void *, size_t size) override { n_ += size; }
    void write_tensor(ggml_tensor *, size_t, size_t size) override { n_ += size; }
    size_t n_bytes() override { return n_; }

  private:
    size_t n_ = 0;
};

// to: room for all that is written.
class lctx_state_writer final : public llama_io_write_i {
  public:
    explicit lctx_state_writer(uint8_t * to) : to_(to) {}

    void write(const void * src, size_t size) override;
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override;
    size_t n_bytes() override { return n_; }

  private:
    uint8_t * const to_;
    size_t n_ = 0;
};

// The windows and recurrent states of a sequence: what its memory cannot go back to by itself.
std::vector<uint8_t> lctx_save_partial(const llama_memory_i & memory, int32_t seq);
