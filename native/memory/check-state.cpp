#include "check-state.h"

#include "../methods/method.h"
#include "ggml-backend.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cells.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <typeinfo>

namespace {

constexpr int32_t MAX_POS = 1 << 30;
constexpr uint64_t MAX_ROW = 1ull << 32;  // bytes of a row, and rows
constexpr size_t PIECE = 1 << 16;

void require(bool ok, const char * reason) {
    if (!ok) {
        throw lctx_refusal(std::string("the saved state is damaged: ") + reason);
    }
}

class checker {
  public:
    checker(llama_io_read_i & io, const llama_hparams & hparams, const lctx_state_kind & kind, std::vector<uint8_t> * bytes)
        : io_(io), hparams_(hparams), kind_(kind), bytes_(bytes) {}

    void kv(const llama_kv_cache & memory) {
        const uint32_t n_stream = memory.get_n_stream();
        require(get<uint32_t>() == n_stream, "it has another number of streams");
        const bool has_ext = hparams_.n_pos_per_embd() > 1 || hparams_.ple_n_heads > 0;
        ends ends;
        for (uint32_t stream = 0; stream < n_stream; stream++) {
            const auto n_cell = get<uint32_t>();
            require(n_cell <= memory.get_size(), "it has more cells than the memory");
            for (uint32_t i = 0; i < n_cell; i++) {
                const auto pos = get<int32_t>();
                const auto n_seq = get<uint32_t>();
                skip(has_ext ? sizeof(llama_kv_cell_ext) : 0);
                cell(pos, n_seq, memory.get_n_seq_max(), n_stream > 1 ? (int32_t)stream : -1, ends);
            }
            kv_rows(n_cell);
        }
        end(ends);
    }

    void recurrent(const llama_memory_recurrent & memory) {
        const auto n_cell = get<uint32_t>();
        require(n_cell <= (kind_.seq >= 0 ? 1 : memory.size), "it has more recurrent states than the memory");
        ends ends;
        for (uint32_t i = 0; i < n_cell; i++) {
            const auto pos = get<int32_t>();
            const auto n_seq = get<uint32_t>();
            if (kind_.seq >= 0) {
                require(n_seq == 0, "a recurrent state names sequences");
                note(kind_.seq, pos, ends);
            } else {
                cell(pos, n_seq, memory.size, -1, ends);
            }
        }
        for (const auto & [seq, of] : ends) {
            require(of.n == 1, "a sequence has two recurrent states");
        }
        end(ends);
        recurrent_rows(memory, n_cell);
    }

  private:
    struct range {
        int32_t first, last, n;
    };
    using ends = std::map<int32_t, range>;  // of every sequence

    void read(void * dst, size_t size) {
        io_.read(dst, size);
        if (bytes_) {
            bytes_->insert(bytes_->end(), (const uint8_t *)dst, (const uint8_t *)dst + size);
        }
    }

    template <typename T> T get() {
        T value;
        read(&value, sizeof(value));
        return value;
    }

    void skip(size_t size) {
        uint8_t bytes[sizeof(llama_kv_cell_ext)];
        read(bytes, size);
    }

    void note(int32_t seq, int32_t pos, ends & ends) const {
        require(pos >= 0 && pos < MAX_POS, "a position is outside of what there is");
        range & of = ends.try_emplace(seq, range{pos, pos, 0}).first->second;
        of.first = std::min(of.first, pos), of.last = std::max(of.last, pos), of.n++;
    }

    // A cell and the sequences that it names, ascending; of one stream, those that it has.
    void cell(int32_t pos, uint32_t n_seq, uint32_t most, int32_t stream, ends & ends) {
        require(n_seq >= 1 && n_seq <= (kind_.seq >= 0 || stream >= 0 ? 1 : most), "a cell belongs to no sequence, or to too many");
        for (int32_t i = 0, last = -1; i < (int32_t)n_seq; i++) {
            const auto seq = get<int32_t>();
            require(kind_.seq >= 0 || (seq > last && seq < (int32_t)most && (stream < 0 || seq == stream)),
                    "a cell belongs to a sequence that there is not");
            last = seq;
            note(kind_.seq >= 0 ? kind_.seq : seq, pos, ends);
        }
    }

    // The cells of a memory beside our cache end where its rows do.
    void end(const ends & ends) {
        for (int32_t seq = 0; seq < (int32_t)kind_.n_pos.size(); seq++) {
            const auto it = ends.find(seq);
            if (kind_.seq >= 0 && seq != kind_.seq) {
                continue;
            }
            const int32_t last = it == ends.end() ? -1 : it->second.last;
            require(last == kind_.n_pos[seq] - 1, "its parts end at different positions");
            require(it == ends.end() || it->second.last - it->second.first + 1 == it->second.n, "positions are missing");
        }
    }

    // n rows, by pieces: nothing is taken for bytes that are not there. A NaN would outlive its row: llama.cpp multiplies masked values by
    // 0.
    void rows(int32_t type, uint64_t row_size, uint64_t n) {
        require(type >= 0 && type < GGML_TYPE_COUNT && ggml_type_size((ggml_type)type) > 0 && row_size < MAX_ROW && n < MAX_ROW,
                "its rows have another type or size");
        const uint64_t most = PIECE / ggml_type_size((ggml_type)type) * ggml_type_size((ggml_type)type);
        uint8_t piece[PIECE];
        for (uint64_t left = row_size * n, size = 0; left > 0; left -= size) {
            size = std::min(left, most);
            read(piece, size);
            require(ggml_validate_row_data((ggml_type)type, piece, size), "it holds numbers that are not finite");
        }
    }

    void kv_rows(uint32_t n_cell) {
        if (n_cell == 0) {
            return;
        }
        const bool is_transposed = get<uint32_t>() != 0;
        const auto n_layer = get<uint32_t>();
        for (uint32_t il = 0; il < n_layer; il++) {
            const auto type = get<int32_t>();
            rows(type, get<uint64_t>(), n_cell);
        }
        for (uint32_t il = 0; il < n_layer && !hparams_.is_mla(); il++) {
            const auto type = get<int32_t>();
            if (is_transposed) {
                const uint64_t size = get<uint32_t>(), n = get<uint32_t>();
                rows(type, size * n_cell, n);
            } else {
                rows(type, get<uint64_t>(), n_cell);
            }
        }
    }

    void recurrent_rows(const llama_memory_recurrent & memory, uint32_t n_cell) {
        require(get<uint32_t>() == 0, "recurrent states are transposed");
        require(get<uint32_t>() == memory.r_l.size(), "it has another number of layers");
        for (size_t il = 0; il < memory.r_l.size(); il++) {
            if (memory.r_l[il]) {
                const auto type = get<int32_t>();
                rows(type, get<uint64_t>(), n_cell);
                if (memory.p_l[il]) {
                    rows(memory.p_l[il]->type, get<uint64_t>(), n_cell);
                }
            }
        }
        for (const ggml_tensor * t : memory.s_l) {
            if (t) {
                const auto type = get<int32_t>();
                rows(type, get<uint64_t>(), n_cell);
            }
        }
    }

    llama_io_read_i & io_;
    const llama_hparams & hparams_;
    const lctx_state_kind & kind_;
    std::vector<uint8_t> * const bytes_;
};

template <typename T> const T * as(const llama_memory_i & memory) {
    return typeid(memory) == typeid(T) ? static_cast<const T *>(&memory) : nullptr;
}

void check_windows(checker & check, const llama_kv_cache_iswa & memory, bool is_partial) {
    if (!is_partial) {
        check.kv(*memory.get_base());
    }
    check.kv(*memory.get_swa());
}

bool check_memory(checker & check, const llama_memory_i & memory, bool is_partial) {
    if (const auto * kv = as<llama_kv_cache>(memory)) {
        check.kv(*kv);
    } else if (const auto * windows = as<llama_kv_cache_iswa>(memory)) {
        check_windows(check, *windows, is_partial);
    } else if (const auto * indexed = as<llama_kv_cache_dsa>(memory)) {
        check.kv(*indexed->get_mla());
        check.kv(*indexed->get_lid());
    } else if (const auto * recurrent = as<llama_memory_recurrent>(memory)) {
        check.recurrent(*recurrent);
    } else if (const auto * hybrid = as<llama_memory_hybrid>(memory)) {
        if (!is_partial) {
            check.kv(*hybrid->get_mem_attn());
        }
        check.recurrent(*hybrid->get_mem_recr());
    } else if (const auto * hybrid_windows = as<llama_memory_hybrid_iswa>(memory)) {
        check_windows(check, *hybrid_windows->get_mem_attn(), is_partial);
        check.recurrent(*hybrid_windows->get_mem_recr());
    } else {
        return false;
    }
    return true;
}

}  // namespace

const uint8_t * lctx_state_reader::next(size_t size) {
    if (size > size_ - at_) {
        throw lctx_refusal("the saved state is shorter than what it should hold");
    }
    at_ += size;
    return data_ + at_ - size;
}

void lctx_state_reader::read(void * dst, size_t size) {
    memcpy(dst, next(size), size);
}

void lctx_state_reader::read_tensor(ggml_tensor * tensor, size_t offset, size_t size) {
    ggml_backend_tensor_set(tensor, next(size), offset, size);
}

bool lctx_check_state(llama_io_read_i & io, const llama_memory_i & memory, const llama_hparams & hparams, const lctx_state_kind & kind,
                      std::vector<uint8_t> * bytes) {
    checker check(io, hparams, kind, bytes);
    return check_memory(check, memory, (kind.flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0);
}
