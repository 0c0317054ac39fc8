// Save and restore: rows as they are stored, so a restored sequence continues with the same logits.
//
// Layout: header, then per sequence its id, counters, and for every layer and KV head the bytes of its rows, block by block,
// K before V, and of its near ring; then what every head holds, summaries of chunks and open queries. The index of keys is
// made again. What differs from this memory is refused with a message, and nothing is left half restored.
#include "kv-cache.h"
#include "llama-io.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

constexpr uint32_t MAGIC = 0x7874636c;  // "lctx"
constexpr uint32_t VERSION = 8;
constexpr uint32_t MAX_SPEC = 4096;  // characters of a method

struct state_header {
    uint32_t magic = MAGIC;
    uint32_t version = VERSION;
    int32_t type_k, type_v;
    int32_t head_dim_k, head_dim_v;
    int32_t n_layer, n_head_total;
    int32_t near_rows;
    int32_t n_seq;  // sequences that follow; 0: a part of one (parts.cpp)
    lctx_rope_settings rope;
    lctx_hadamard hadamard;
};

struct state_sequence {
    int32_t seq;
    int32_t n_pos;
    int32_t first_live;
    int32_t first_near;
    int32_t open[2];
    int32_t evicted_to;
    int32_t voted_to;
    int32_t undo_from;
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

void lctx_kv_cache::write_sequence(llama_io_write_i & io, int32_t seq) const {
    const sequence & s = seqs_[seq];
    put(io, state_sequence{seq, s.n_pos, s.first_live, s.first_near, {s.open[0], s.open[1]}, s.evicted_to, s.voted_to, s.undo_from});
    write_spans(io, seq);
    each_head([&](const lctx_kv_store & store, int32_t head) {
        if (retain_) {
            put(io, store.gone(seq, head));
        }
    });
    each_run(seq, whole(seq),
             [&](lctx_kv_store &, const lctx_plane & plane, size_t offset, size_t size) { io.write_tensor(plane.tensor, offset, size); });
}

void lctx_kv_cache::write_header(llama_io_write_i & io, int32_t n_seq) const {
    state_header header = {};
    header.type_k = shape_.type_k;
    header.type_v = shape_.type_v;
    header.head_dim_k = shape_.head_dim_k;
    header.head_dim_v = shape_.head_dim_v;
    header.n_layer = (int32_t)layers_.size();
    header.n_head_total = n_head_total_;
    header.near_rows = n_seq > 0 ? shape_.near_rows : method_->near_window();  // a part has near keys of the window alone
    header.n_seq = n_seq;
    header.rope = rope_;
    header.hadamard = shape_.hadamard;
    put(io, header);
    io.write_string(method_->full_spec());
}

void lctx_kv_cache::state_write(llama_io_write_i & io, int32_t seq_id) const {
    if (seq_id >= n_seq_) {
        throw lctx_refusal("sequence " + std::to_string(seq_id) + " is outside n_seq_max " + std::to_string(n_seq_));
    }
    for (const auto & store : stores_) {
        store->wait();
    }
    write_header(io, seq_id < 0 ? n_seq_ : 1);
    for (int32_t seq = std::max(seq_id, 0); seq < (seq_id < 0 ? n_seq_ : seq_id + 1); seq++) {
        write_sequence(io, seq);
    }
}

// Why entries of a plane cannot be in this state; empty when they can. Kernels trust the lists of rows: ascending, and below the end.
std::string lctx_kv_cache::why_no_values(const sequence & s, const lctx_plane & plane, const std::vector<uint8_t> & bytes) const {
    std::vector<int32_t> list(bytes.size() / sizeof(int32_t));
    const auto n = (int32_t)list.size(), n_dense = s.n_pos - s.evicted_to;
    switch (plane.values) {
        case lctx_plane_values::any: return "";
        case lctx_plane_values::finite:
            return ggml_validate_row_data(plane.tensor->type, bytes.data(), bytes.size()) ? "" : "it holds numbers that are not finite";
        default: memcpy(list.data(), bytes.data(), bytes.size());
    }
    for (int32_t i = 0; plane.values == lctx_plane_values::rows && i < n; i++) {
        const int32_t row = list[i], before = i > 0 ? list[i - 1] : -1;
        if (row <= before || row >= s.n_pos || (i >= n - n_dense && row != s.n_pos - (n - i))) {
            return "its lists of rows contradict its counters";
        }
    }
    // of a score that can be taken back, those of rows that were there before
    const int32_t n_undo = s.undo_from >= 0 ? n - (s.n_pos - s.undo_from) : 0;
    const int32_t n_score = plane.values == lctx_plane_values::scores ? n : plane.values == lctx_plane_values::undo ? n_undo : 0;
    const bool ok = std::all_of(list.begin(), list.begin() + n_score, [&](int32_t score) { return is_score(score, s.voted_to); });
    return ok ? "" : "it has scores that no query gives";
}

// Whether queries before voted_to may have given a row this score.
bool lctx_kv_cache::is_score(int32_t score, int32_t voted_to) const {
    switch (retain_->score) {
        case LCTX_SCORE_LAST:  return score >= -1 && score < voted_to;
        case LCTX_SCORE_COUNT: return score >= 0 && score <= (int64_t)voted_to * n_query_head_total_;
        default:               return lctx_held::as_float(score) >= 0.0f && std::isfinite(lctx_held::as_float(score));
    }
}

// Why a sequence cannot have been in this state; empty when it can.
std::string lctx_kv_cache::why_no_state(const sequence & s) const {
    constexpr const char * WRONG = "its counters contradict each other";
    const int32_t n = s.n_pos;
    if (n < 0 || n > n_ctx_) {
        return "it holds " + std::to_string(n) + " tokens, n_ctx is " + std::to_string(n_ctx_);
    }
    // drop_dead, and what why_not_back_to allows
    if (s.first_live < 0 || s.first_live % LCTX_PAGE_ROWS != 0 || s.first_live > std::max(method_->first_row(n), method_->n_sink())) {
        return WRONG;
    }
    const int32_t most_near = shape_.near_rows > 0 ? std::max(0, n - method_->near_window() + 1) : 0;
    if (s.first_near < std::max(0, shape_.near_rows > 0 ? n - shape_.near_rows : 0) || s.first_near > most_near) {
        return WRONG;
    }
    for (int32_t chunk : s.open) {
        if (chunk != -1 && (!has_open() || chunk < 0 || (int64_t)chunk * chunks_->chunk_size >= n)) {
            return WRONG;
        }
    }
    const bool has_queries = !has_open() || n % chunks_->chunk_size == 0 || s.half(n / chunks_->chunk_size) >= 0;
    if (!has_queries || (s.open[0] >= 0 && s.open[0] == s.open[1])) {
        return WRONG;
    }
    if (!retain_) {
        return s.evicted_to == 0 && s.voted_to == 0 && s.undo_from == -1 ? "" : WRONG;
    }
    if (retain_->waits()) {  // one eviction, anywhere
        return s.evicted_to >= 0 && s.evicted_to <= n && s.voted_to == s.evicted_to && s.undo_from == -1 ? "" : WRONG;
    }
    // evictions come at borders, and none is left out
    const int32_t every = retain_->evict_every, last_border = n == 0 ? 0 : (n - 1) / every * every;
    if (s.evicted_to != last_border && (s.evicted_to != n || n % every != 0)) {
        return WRONG;
    }
    const bool has_voted = n > s.evicted_to && retain_->votes(n - 1);
    const bool votes = s.voted_to <= n && s.voted_to >= (has_voted ? n : s.evicted_to);
    return votes && (s.undo_from == -1 || (s.undo_from >= s.evicted_to && s.undo_from < s.voted_to)) ? "" : WRONG;
}

void lctx_kv_cache::read_sequence(llama_io_read_i & io, int32_t seq) {
    const auto saved = get<state_sequence>(io);
    sequence s = {saved.n_pos, saved.first_live, saved.first_near, {saved.open[0], saved.open[1]},
                  0,           saved.evicted_to, saved.voted_to,   saved.undo_from};
    const std::string wrong = why_no_state(s);
    require(wrong.empty(), wrong);
    s.spans = read_spans(io, s.n_pos);
    std::vector<int32_t> gone(n_head_total_);
    if (retain_) {
        io.read(gone.data(), n_head_total_ * sizeof(int32_t));
    }
    // the newest rows before a border stay
    const int32_t most_gone = retain_ ? std::max(0, s.evicted_to - retain_->recent) : 0;
    require(std::all_of(gone.begin(), gone.end(), [&](int32_t n) { return 0 <= n && n <= most_gone; }),
            "its counters contradict each other");
    lctx_growth growth = {s.n_pos, {}, s.first_live};
    for (int32_t n : gone) {
        growth.n_each.push_back(s.n_pos - n);
    }
    const std::string why = grow_to_write(seq, growth);
    require(why.empty(), why);
    seqs_[seq] = s;
    std::vector<uint8_t> bytes;
    each_run(seq, whole(seq), [&](lctx_kv_store & store, const lctx_plane & plane, size_t offset, size_t size) {
        bytes.resize(size);
        io.read(bytes.data(), size);
        const std::string bad = why_no_values(s, plane, bytes);
        require(bad.empty(), bad);
        store.land(plane.tensor, offset, bytes.data(), size);
    });
    for (const auto & store : stores_) {
        store->set_headers(seq, s.evicted_to, s.undo_from);
    }
    index_rows(seq, 0, s.n_pos);
}

void lctx_kv_cache::check_header(llama_io_read_i & io, int32_t n_seq) const {
    const auto header = get<state_header>(io);
    require(header.magic == MAGIC, "it was not written by a context with a method");
    require(header.version == VERSION, "its version is " + std::to_string(header.version) + ", this one reads " + std::to_string(VERSION));
    const auto n_spec = get<uint32_t>(io);
    require(n_spec <= MAX_SPEC, "its method is not readable");
    std::string spec(n_spec, 0);
    io.read(spec.data(), n_spec);
    require(std::all_of(spec.begin(), spec.end(), [](char c) { return c >= ' ' && c <= '~'; }), "its method is not readable");
    require(spec == method_->full_spec(), "it was written with " + spec + ", this context runs " + method_->full_spec());
    require(header.type_k == shape_.type_k && header.type_v == shape_.type_v, "its K or V type is another one");
    require(header.head_dim_k == shape_.head_dim_k && header.head_dim_v == shape_.head_dim_v && header.n_layer == (int32_t)layers_.size() &&
                header.n_head_total == n_head_total_,
            "it belongs to a model of another shape");
    require(memcmp(&header.rope, &rope_, sizeof(rope_)) == 0, "its keys were rotated with other RoPE settings");
    require(header.hadamard.k == shape_.hadamard.k && header.hadamard.v == shape_.hadamard.v,
            "its rows were stored with another Hadamard transform (LLAMA_ATTN_ROT_DISABLE)");
    require(header.near_rows == (n_seq > 0 ? shape_.near_rows : method_->near_window()), "it was written with another n_batch or n_ubatch");
    require(header.n_seq == n_seq, "it holds " + std::to_string(header.n_seq) + " sequences");
}

void lctx_kv_cache::state_read(llama_io_read_i & io, int32_t seq_id) {
    require(seq_id < n_seq_, "there is no sequence " + std::to_string(seq_id));
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
