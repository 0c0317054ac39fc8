// Save and restore: rows as they are stored, so a restored sequence continues with the same logits.
//
// Layout: header, then per sequence its id, counters, and for every layer and KV head the bytes of its rows, block by block,
// K before V, and of its near ring; then representations of chunks and open queries. What differs from this memory is refused with a
// message, and nothing is left half restored.
#include "llama-io.h"
#include "memory.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr uint32_t MAGIC = 0x7874636c;  // "lctx"
constexpr uint32_t VERSION = 2;

struct state_header {
    uint32_t magic = MAGIC;
    uint32_t version = VERSION;
    int32_t type_k, type_v;
    int32_t head_dim_k, head_dim_v;
    int32_t n_layer, n_head_total;
    int32_t near_rows;
    int32_t n_seq;  // sequences that follow
};

struct state_sequence {
    int32_t seq;
    int32_t n_pos;
    int32_t first_live;
    int32_t first_near;
    int32_t open[2];
};

template <typename T> void put(llama_io_write_i & io, const T & value) {
    io.write(&value, sizeof(value));
}

template <typename T> T get(llama_io_read_i & io) {
    T value;
    io.read(&value, sizeof(value));
    return value;
}

void require(bool ok, const std::string & reason) {
    if (!ok) {
        throw lctx_refusal("the saved state does not fit: " + reason);
    }
}

}  // namespace

// f(tensor, offset, size) for every run of bytes that holds rows of the sequence.
template <typename F> void lctx_memory::each_run(int32_t seq, F && f) const {
    const int32_t n_pos = seqs_[seq].n_pos;
    for (int32_t head = 0; head < n_head_total_; head++) {
        for (int32_t block = 0; block < n_block(n_pos); block++) {
            if (!has_block(seq, block)) {
                continue;
            }
            const size_t row = (size_t)page(seq, head, block) * LCTX_PAGE_ROWS;
            const size_t n = std::min(LCTX_PAGE_ROWS, n_pos - block * LCTX_PAGE_ROWS);
            f(k_pool_, row * k_pool_->nb[1], n * k_pool_->nb[1]);
            f(v_pool_, row * v_pool_->nb[1], n * v_pool_->nb[1]);
        }
        if (near_) {
            f(near_, seq * near_->nb[3] + head * near_->nb[2], (size_t)std::min(n_pos, near_rows_) * near_->nb[1]);
        }
    }
}

void lctx_memory::write_sequence(llama_io_write_i & io, int32_t seq) const {
    const sequence & s = seqs_[seq];
    put(io, state_sequence{seq, s.n_pos, s.first_live, s.first_near, {s.open[0], s.open[1]}});
    const auto write = [&](ggml_tensor * t, size_t offset, size_t size) { io.write_tensor(t, offset, size); };
    each_run(seq, write);
    each_chunk_run(seq, write);
}

void lctx_memory::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    if (flags != 0 || seq_id >= n_seq_) {
        throw lctx_refusal(flags ? "partial and on-device states are not available for a context with a method"
                                 : "sequence " + std::to_string(seq_id) + " is outside n_seq_max " + std::to_string(n_seq_));
    }
    state_header header = {};
    header.type_k = type_k_;
    header.type_v = type_v_;
    header.head_dim_k = head_dim_k_;
    header.head_dim_v = head_dim_v_;
    header.n_layer = (int32_t)n_head_kv_.size();
    header.n_head_total = n_head_total_;
    header.near_rows = near_rows_;
    header.n_seq = seq_id < 0 ? n_seq_ : 1;
    put(io, header);
    io.write_string(method_->spec());
    for (int32_t seq = std::max(seq_id, 0); seq < (seq_id < 0 ? n_seq_ : seq_id + 1); seq++) {
        write_sequence(io, seq);
    }
}

void lctx_memory::read_sequence(llama_io_read_i & io, int32_t seq) {
    const auto saved = get<state_sequence>(io);
    const int32_t n_pos = saved.n_pos;
    require(n_pos >= 0 && n_pos <= n_ctx_, "it holds " + std::to_string(n_pos) + " tokens, n_ctx is " + std::to_string(n_ctx_));
    require(saved.first_live >= 0 && saved.first_live <= n_pos && saved.first_live % LCTX_PAGE_ROWS == 0 && saved.first_near >= 0 &&
                saved.first_near <= n_pos,
            "its counters contradict each other");
    for (int32_t chunk : saved.open) {
        require(chunk == -1 || (open_ && chunk >= 0 && (int64_t)chunk * chunks_->chunk_size < n_pos), "its counters contradict each other");
    }
    const int32_t first_kept = n_block(method_->n_sink());
    for (int32_t block = 0; block < n_block(n_pos); block++) {
        const bool dead = block >= first_kept && (block + 1) * LCTX_PAGE_ROWS <= saved.first_live;
        require(dead || take_block(seq, block), "the page pool is too small");
        seqs_[seq].n_pos = std::min(n_pos, (block + 1) * LCTX_PAGE_ROWS);
    }
    seqs_[seq] = {n_pos, saved.first_live, saved.first_near, {saved.open[0], saved.open[1]}, 0};
    near_touched_[seq] = std::max(near_touched_[seq], std::min(n_pos, near_rows_));
    const auto read = [&](ggml_tensor * t, size_t offset, size_t size) { io.read_tensor(t, offset, size); };
    each_run(seq, read);
    each_chunk_run(seq, read);
}

void lctx_memory::check_header(llama_io_read_i & io, int32_t n_seq) const {
    const auto header = get<state_header>(io);
    require(header.magic == MAGIC, "it was not written by a context with a method");
    require(header.version == VERSION, "its version is " + std::to_string(header.version) + ", this one reads " + std::to_string(VERSION));
    std::string spec;
    io.read_string(spec);
    require(spec == method_->spec(), "it was written with " + spec + ", this context runs " + method_->spec());
    require(header.type_k == type_k_ && header.type_v == type_v_, "its K or V type is another one");
    require(header.head_dim_k == head_dim_k_ && header.head_dim_v == head_dim_v_ && header.n_layer == (int32_t)n_head_kv_.size() &&
                header.n_head_total == n_head_total_,
            "it belongs to a model of another shape");
    require(header.near_rows == near_rows_, "it was written with another n_batch or n_ubatch");
    require(header.n_seq == n_seq, "it holds " + std::to_string(header.n_seq) + " sequences");
}

void lctx_memory::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    require(flags == 0 && seq_id < n_seq_, "the sequence or the flags are not available");
    const int32_t first = std::max(seq_id, 0), end = seq_id < 0 ? n_seq_ : seq_id + 1;
    const auto forget = [&] {
        for (int32_t seq = first; seq < end; seq++) {
            truncate(seq, 0);
        }
    };
    forget();
    try {
        check_header(io, end - first);
        for (int32_t seq = first; seq < end; seq++) {
            read_sequence(io, seq);
        }
    } catch (...) {
        forget();
        throw;
    }
}
