#include "state-io.h"

#include "../base/refusal.h"
#include "ggml-backend.h"
#include "llama-memory.h"

#include <cstring>

void lctx_require_state(bool ok, const std::string & reason) {
    if (!ok) {
        throw lctx_refusal("the saved state does not fit: " + reason);
    }
}

const uint8_t * lctx_state_reader::take(size_t size) {
    if (size > size_ - at_) {
        throw lctx_refusal("the saved state is shorter than what it should hold");
    }
    at_ += size;
    return data_ + at_ - size;
}

void lctx_state_reader::read(void * dst, size_t size) {
    memcpy(dst, take(size), size);
}

void lctx_state_reader::read_tensor(ggml_tensor * tensor, size_t offset, size_t size) {
    ggml_backend_tensor_set(tensor, take(size), offset, size);
}

void lctx_state_writer::write(const void * src, size_t size) {
    memcpy(to_ + n_, src, size);
    n_ += size;
}

void lctx_state_writer::write_tensor(ggml_tensor * tensor, size_t offset, size_t size) {
    ggml_backend_tensor_get(tensor, to_ + n_, offset, size);
    n_ += size;
}

std::vector<uint8_t> lctx_save_partial(const llama_memory_i & memory, int32_t seq) {
    lctx_state_counter size;
    memory.state_write(size, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    std::vector<uint8_t> bytes(size.n_bytes());
    lctx_state_writer io(bytes.data());
    memory.state_write(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    return bytes;
}
