#include "check-state.h"

#include "../base/refusal.h"
#include "ggml-backend.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-cells.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <typeinfo>

namespace {

constexpr int32_t MAX_POS = 1 << 30;
constexpr uint64_t MAX_ROW = 1ull << 32;  // bytes of a row, and rows
constexpr size_t PIECE = 1 << 16, MAX_LAYER = 1 << 16;

void require(bool ok, const char * reason) {
    if (!ok) {
        throw lctx_refusal(std::string("the saved state is damaged: ") + reason);
    }
}

class checker {
  public:
    checker(llama_io_read_i & io, const llama_hparams & hparams, const lctx_state_kind & kind,
            std::vector<uint8_t> * bytes)
        : io_(io), hparams_(hparams), kind_(kind), bytes_(bytes) {}

    void kv(const llama_kv_cache & memory) {
        cache(memory, hparams_.n_pos_per_embd() > 1 || hparams_.ple_n_heads > 0, hparams_.is_mla());
    }

    // Keys alone, without values: of an indexer.
    void keys(const llama_kv_cache & memory) { cache(memory, hparams_.ple_n_heads > 0, true); }

    // The part that was read last has its rows where another has them: what an indexer selects are numbers of cells.
    void same(const std::vector<int32_t> & cells) const {
        require(cells == cells_, "its parts hold different positions");
    }

    void cache(const llama_kv_cache & memory, bool has_ext, bool keys_only) {
        const uint32_t n_stream = memory.get_n_stream();
        require(get<uint32_t>() == n_stream, "it has another number of streams");
        ends ends;
        cells_.clear();
        for (uint32_t stream = 0; stream < n_stream; stream++) {
            const auto n_cell = get<uint32_t>();
            require(n_cell <= memory.get_size(), "it has more cells than the memory");
            cells_.push_back(-1);
            for (uint32_t i = 0; i < n_cell; i++) {
                const auto pos = get<int32_t>();
                const auto n_seq = get<uint32_t>();
                skip(has_ext ? sizeof(llama_kv_cell_ext) : 0);
                cell(pos, n_seq, memory.get_n_seq_max(), n_stream > 1 ? (int32_t)stream : -1, ends);
            }
            kv_rows(n_cell, keys_only);
        }
        end(ends);
    }

    const std::vector<int32_t> & cells() const { return cells_; }

    // Positions are indices in what llama.cpp computes with: none is missing, and they end where the memory does.
    void whole(uint64_t n_pos) { most_pos_ = (int64_t)n_pos, is_whole_ = true; }

    void compressed(const llama_kv_cache & memory) {
        get<uint32_t>();  // the version
        require(get<uint32_t>() <= memory.get_size(), "it has more cells than the memory");
        layers(memory.get_n_stream(), memory.get_layer_ids().size(), 1);
    }

    void compressor(const llama_dsv4_comp_state & state) {
        uint32_t version_and_sizes[4];
        read(version_and_sizes, sizeof(version_and_sizes));
        layers(state.get_n_stream(), MAX_LAYER, 2);
    }

    void head() {
        uint32_t magic_version_mode[3];
        read(magic_version_mode, sizeof(magic_version_mode));
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

    static bool is_gapless(const range & of) { return of.last - of.first + 1 == of.n; }

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
        require(pos >= 0 && pos < most_pos_, "a position is outside of what there is");
        range & of = ends.try_emplace(seq, range{pos, pos, 0}).first->second;
        of.first = std::min(of.first, pos), of.last = std::max(of.last, pos), of.n++;
    }

    // A cell and the sequences that it names, ascending; of one stream, those that it has.
    void cell(int32_t pos, uint32_t n_seq, uint32_t most, int32_t stream, ends & ends) {
        require(n_seq >= 1 && n_seq <= (kind_.seq >= 0 || stream >= 0 ? 1 : most),
                "a cell belongs to no sequence, or to too many");
        for (int32_t i = 0, last = -1; i < (int32_t)n_seq; i++) {
            const auto seq = get<int32_t>();
            require(kind_.seq >= 0 || (seq > last && seq < (int32_t)most && (stream < 0 || seq == stream)),
                    "a cell belongs to a sequence that there is not");
            last = seq;
            cells_.insert(cells_.end(), {pos, seq});
            note(kind_.seq >= 0 ? kind_.seq : seq, pos, ends);
        }
    }

    // The cells of all parts end at the same positions; with our cache, where its rows do.
    void end(const ends & ends) {
        std::map<int32_t, int32_t> last;
        for (const auto & [seq, of] : ends) {
            last[seq] = of.last;
            require(!is_whole_ || (is_gapless(of) && (last_ || of.first == 0)), "positions are missing");
        }
        require(!last_ || *last_ == last, "its parts end at different positions");
        last_ = last;
        for (int32_t seq = 0; seq < (int32_t)kind_.n_pos.size(); seq++) {
            const auto it = ends.find(seq);
            if (kind_.seq >= 0 && seq != kind_.seq) {
                continue;
            }
            const int32_t its_last = it == ends.end() ? -1 : it->second.last;
            require(its_last == kind_.n_pos[seq] - 1, "its parts end at different positions");
            require(it == ends.end() || is_gapless(it->second), "positions are missing");
        }
    }

    // n rows, by pieces: nothing is taken for bytes that are not there. A NaN would outlive its row: llama.cpp
    // multiplies masked values by 0.
    void rows(int32_t type, uint64_t row_size, uint64_t n) {
        require(type >= 0 && type < GGML_TYPE_COUNT && ggml_type_size((ggml_type)type) > 0 && row_size < MAX_ROW &&
                    n < MAX_ROW,
                "its rows have another type or size");
        const uint64_t most = PIECE / ggml_type_size((ggml_type)type) * ggml_type_size((ggml_type)type);
        uint8_t piece[PIECE];
        for (uint64_t left = row_size * n, size = 0; left > 0; left -= size) {
            size = std::min(left, most);
            read(piece, size);
            require(ggml_validate_row_data((ggml_type)type, piece, size), "it holds numbers that are not finite");
        }
    }

    void kv_rows(uint32_t n_cell, bool keys_only) {
        if (n_cell == 0) {
            return;
        }
        const bool is_transposed = get<uint32_t>() != 0;
        const auto n_layer = get<uint32_t>();
        for (uint32_t il = 0; il < n_layer; il++) {
            const auto type = get<int32_t>();
            rows(type, get<uint64_t>(), n_cell);
        }
        for (uint32_t il = 0; il < n_layer && !keys_only; il++) {
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

    // Read what llama.cpp compares with its own tensors: of every layer its number, and n tensors of as many rows for
    // every stream.
    void layers(uint32_t n_stream, size_t most, int n) {
        const auto n_saved = get<uint32_t>(), n_layer = get<uint32_t>();
        require(n_saved <= n_stream && n_layer <= most, "it has another number of streams or layers");
        for (uint32_t il = 0; il < n_layer; il++) {
            get<uint32_t>();
            for (int i = 0; i < n; i++) {
                const auto type = get<int32_t>();
                get<uint64_t>();
                const auto n_row = get<uint64_t>(), row_size = get<uint64_t>();
                require(n_row < MAX_ROW, "its rows have another type or size");
                rows(type, row_size, n_row * n_saved);
            }
        }
    }

    llama_io_read_i & io_;
    const llama_hparams & hparams_;
    const lctx_state_kind & kind_;
    std::vector<uint8_t> * const bytes_;
    std::vector<int32_t> cells_;                      // of the part that was read last
    std::optional<std::map<int32_t, int32_t>> last_;  // position of every sequence, of the parts that were read
    int64_t most_pos_ = MAX_POS;
    bool is_whole_ = false;
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

void check_selected(checker & check, const llama_kv_cache_dsa & memory) {
    check.kv(*memory.get_mla());
    const std::vector<int32_t> cells = check.cells();
    check.keys(*memory.get_lid());
    check.same(cells);
}

void check_blocks(checker & check, const llama_kv_cache_msa & memory) {
    check.whole(memory.get_base()->get_size());
    check.kv(*memory.get_base());
    const std::vector<int32_t> cells = check.cells();
    check.kv(*memory.get_idx());
    check.same(cells);
}

void check_compressed(checker & check, const llama_kv_cache_dsv4 & memory) {
    check.head();
    check.whole(memory.get_raw()->get_base()->get_size());
    check.keys(*memory.get_raw()->get_base());
    check.keys(*memory.get_raw()->get_swa());
    for (const llama_kv_cache * kv : {memory.get_csa(), memory.get_hca(), memory.get_lid()}) {
        check.compressed(*kv);
    }
    for (const llama_dsv4_comp_state * state :
         {memory.get_csa_state(), memory.get_hca_state(), memory.get_lid_state()}) {
        check.compressor(*state);
    }
}

void check_indexed(checker & check, const llama_memory_hybrid_idx & memory) {
    check.kv(*memory.get_mem_attn());
    const std::vector<int32_t> cells = check.cells();
    check.recurrent(*memory.get_mem_recr());
    if (memory.get_mem_idx()) {
        check.keys(*memory.get_mem_idx());
        check.same(cells);
    }
}

void check_memory(checker & check, const llama_memory_i & memory, bool is_partial) {
    if (const auto * kv = as<llama_kv_cache>(memory)) {
        check.kv(*kv);
    } else if (const auto * windows = as<llama_kv_cache_iswa>(memory)) {
        check_windows(check, *windows, is_partial);
    } else if (const auto * indexed = as<llama_kv_cache_dsa>(memory)) {
        check_selected(check, *indexed);
    } else if (const auto * blocks = as<llama_kv_cache_msa>(memory)) {
        check_blocks(check, *blocks);
    } else if (const auto * indexed_windows = as<llama_kv_cache_dsa_iswa>(memory)) {
        check_selected(check, *indexed_windows->get_dsa());
        check.kv(*indexed_windows->get_swa());
    } else if (const auto * compressed = as<llama_kv_cache_dsv4>(memory)) {
        check_compressed(check, *compressed);
    } else if (const auto * recurrent = as<llama_memory_recurrent>(memory)) {
        check.recurrent(*recurrent);
    } else if (const auto * hybrid = as<llama_memory_hybrid>(memory)) {
        if (!is_partial) {
            check.kv(*hybrid->get_mem_attn());
        }
        check.recurrent(*hybrid->get_mem_recr());
    } else if (const auto * indexed_hybrid = as<llama_memory_hybrid_idx>(memory)) {
        check_indexed(check, *indexed_hybrid);
    } else if (const auto * hybrid_windows = as<llama_memory_hybrid_iswa>(memory)) {
        check_windows(check, *hybrid_windows->get_mem_attn(), is_partial);
        check.recurrent(*hybrid_windows->get_mem_recr());
    } else {
        throw lctx_refusal("a saved state of this kind of memory cannot be checked, and so it cannot be loaded");
    }
}

}  // namespace

void lctx_check_state(llama_io_read_i & io, const llama_memory_i & memory, const llama_hparams & hparams,
                      const lctx_state_kind & kind, std::vector<uint8_t> * bytes) {
    checker check(io, hparams, kind, bytes);
    check_memory(check, memory, (kind.flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0);
}
