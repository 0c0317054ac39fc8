// Save and restore: rows as they are stored, so a restored sequence continues with the same logits.
//
// Layout: header, then per sequence its id, counters, and for every layer and KV head the bytes of its rows, block by
// block, K before V, and of its near ring; then what every head holds, summaries of chunks and open queries. The index
// of keys is made again. What differs from this memory is refused with a message, and nothing is left half restored.
#include "state.h"

#include "plane-runs.h"
#include "state-io.h"

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
    int32_t n_seq;  // sequences that follow; 0: a slice of one (slice.cpp)
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

void write_sequence(const lctx_cache_parts & parts, llama_io_write_i & io, int32_t seq) {
    const lctx_sequence & s = parts.seqs[seq];
    put(io,
        state_sequence{
            seq, s.n_pos, s.first_live, s.first_near, {s.open[0], s.open[1]}, s.evicted_to, s.voted_to, s.undo_from});
    parts.seqs.write_spans(io, seq);
    parts.placement.each_head([&](const lctx_device_store & store, int32_t head) {
        if (parts.placement.retain()) {
            put(io, store.gone(seq, head));
        }
    });
    lctx_each_run(parts.placement, parts.seqs, seq, lctx_whole(parts.seqs, seq),
                  [&](lctx_device_store &, const lctx_plane & plane, size_t offset, size_t size) {
                      io.write_tensor(plane.tensor, offset, size);
                  });
}

// Return whether queries before voted_to may have given a row this score.
bool is_score(const lctx_cache_parts & parts, int32_t score, int32_t voted_to) {
    switch (parts.placement.retain()->score) {
        case LCTX_SCORE_LAST:  return score >= -1 && score < voted_to;
        case LCTX_SCORE_COUNT: return score >= 0 && score <= (int64_t)voted_to * parts.placement.n_query_head();
        default:               return lctx_held::as_float(score) >= 0.0f && std::isfinite(lctx_held::as_float(score));
    }
}

// Return why entries of a plane cannot be in this state; empty when they can. Kernels trust the lists of rows:
// ascending, and below the end.
std::string why_no_values(const lctx_cache_parts & parts, const lctx_sequence & s, const lctx_plane & plane,
                          const std::vector<uint8_t> & bytes) {
    std::vector<int32_t> list(bytes.size() / sizeof(int32_t));
    const auto n = (int32_t)list.size(), n_dense = s.n_pos - s.evicted_to;
    switch (plane.values) {
        case lctx_plane_values::any: return "";
        case lctx_plane_values::finite:
            return ggml_validate_row_data(plane.tensor->type, bytes.data(), bytes.size())
                       ? ""
                       : "it holds numbers that are not finite";
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
    const int32_t n_score = plane.values == lctx_plane_values::scores ? n
                            : plane.values == lctx_plane_values::undo ? n_undo
                                                                      : 0;
    const bool ok = std::all_of(list.begin(), list.begin() + n_score,
                                [&](int32_t score) { return is_score(parts, score, s.voted_to); });
    return ok ? "" : "it has scores that no query gives";
}

// The sequence that was saved, without its rows.
lctx_sequence read_counters(const lctx_cache_parts & parts, llama_io_read_i & io) {
    const auto saved = get<state_sequence>(io);
    lctx_sequence s;
    s.n_pos = saved.n_pos;
    s.first_live = saved.first_live;
    s.first_near = saved.first_near;
    std::copy_n(saved.open, 2, s.open);
    s.evicted_to = saved.evicted_to;
    s.voted_to = saved.voted_to;
    s.undo_from = saved.undo_from;
    const std::string wrong = parts.seqs.why_unsound(s);
    lctx_require_state(wrong.empty(), wrong);
    s.spans = parts.seqs.read_spans(io, s.n_pos);
    return s;
}

// Read how the sequence grows to the saved one.
lctx_growth read_growth(const lctx_cache_parts & parts, llama_io_read_i & io, const lctx_sequence & s) {
    std::vector<int32_t> gone(parts.placement.n_head());
    if (parts.placement.retain()) {
        io.read(gone.data(), parts.placement.n_head() * sizeof(int32_t));
    }
    // the newest rows before a border stay
    const int32_t most_gone =
        parts.placement.retain() ? std::max(0, s.evicted_to - parts.placement.retain()->recent) : 0;
    lctx_require_state(std::all_of(gone.begin(), gone.end(), [&](int32_t n) { return 0 <= n && n <= most_gone; }),
                       "its counters contradict each other");
    lctx_growth growth = {s.n_pos, {}, s.first_live};
    for (int32_t n : gone) {
        growth.n_each.push_back(s.n_pos - n);
    }
    return growth;
}

void read_sequence(lctx_cache_parts & parts, llama_io_read_i & io, int32_t seq) {
    const lctx_sequence s = read_counters(parts, io);
    const std::string why = parts.blocks.grow_to_write(seq, read_growth(parts, io, s));
    lctx_require_state(why.empty(), why);
    parts.seqs[seq] = s;
    std::vector<uint8_t> bytes;
    lctx_each_run(parts.placement, parts.seqs, seq, lctx_whole(parts.seqs, seq),
                  [&](lctx_device_store & store, const lctx_plane & plane, size_t offset, size_t size) {
                      bytes.resize(size);
                      io.read(bytes.data(), size);
                      const std::string bad = why_no_values(parts, s, plane, bytes);
                      lctx_require_state(bad.empty(), bad);
                      store.land(plane.tensor, offset, bytes.data(), size);
                  });
    for (const auto & store : parts.placement.stores()) {
        store->set_headers(seq, s.evicted_to, s.undo_from);
    }
    parts.index_rows(seq, 0, s.n_pos);
}

}  // namespace

void lctx_write_header(const lctx_cache_parts & parts, llama_io_write_i & io, int32_t n_seq) {
    const lctx_kv_shape & shape = parts.placement.shape();
    const lctx_method & method = parts.placement.method();
    state_header header = {};
    header.type_k = shape.type_k;
    header.type_v = shape.type_v;
    header.head_dim_k = shape.head_dim_k;
    header.head_dim_v = shape.head_dim_v;
    header.n_layer = (int32_t)parts.placement.layers().size();
    header.n_head_total = parts.placement.n_head();
    header.near_rows = n_seq > 0 ? shape.near_rows : method.near_window();  // a slice has near keys of the window alone
    header.n_seq = n_seq;
    header.rope = parts.rope;
    header.hadamard = shape.hadamard;
    put(io, header);
    io.write_string(method.full_spec());
}

void lctx_write_state(const lctx_cache_parts & parts, llama_io_write_i & io, int32_t seq_id) {
    const int32_t n_seq = parts.seqs.size();
    if (seq_id >= n_seq) {
        throw lctx_refusal("sequence " + std::to_string(seq_id) + " is outside n_seq_max " + std::to_string(n_seq));
    }
    parts.placement.wait();
    lctx_write_header(parts, io, seq_id < 0 ? n_seq : 1);
    for (int32_t seq = std::max(seq_id, 0); seq < (seq_id < 0 ? n_seq : seq_id + 1); seq++) {
        write_sequence(parts, io, seq);
    }
}

void lctx_check_header(const lctx_cache_parts & parts, llama_io_read_i & io, int32_t n_seq) {
    const lctx_kv_shape & shape = parts.placement.shape();
    const lctx_method & method = parts.placement.method();
    const auto header = get<state_header>(io);
    lctx_require_state(header.magic == MAGIC, "it was not written by a context with a method");
    lctx_require_state(header.version == VERSION, "its version is " + std::to_string(header.version) +
                                                      ", this one reads " + std::to_string(VERSION));
    const auto n_spec = get<uint32_t>(io);
    lctx_require_state(n_spec <= MAX_SPEC, "its method is not readable");
    std::string spec(n_spec, 0);
    io.read(spec.data(), n_spec);
    lctx_require_state(std::all_of(spec.begin(), spec.end(), [](char c) { return c >= ' ' && c <= '~'; }),
                       "its method is not readable");
    lctx_require_state(spec == method.full_spec(),
                       "it was written with " + spec + ", this context runs " + method.full_spec());
    lctx_require_state(header.type_k == shape.type_k && header.type_v == shape.type_v,
                       "its K or V type is another one");
    lctx_require_state(header.head_dim_k == shape.head_dim_k && header.head_dim_v == shape.head_dim_v &&
                           header.n_layer == (int32_t)parts.placement.layers().size() &&
                           header.n_head_total == parts.placement.n_head(),
                       "it belongs to a model of another shape");
    lctx_require_state(memcmp(&header.rope, &parts.rope, sizeof(parts.rope)) == 0,
                       "its keys were rotated with other RoPE settings");
    lctx_require_state(header.hadamard.k == shape.hadamard.k && header.hadamard.v == shape.hadamard.v,
                       "its rows were stored with another Hadamard transform (LLAMA_ATTN_ROT_DISABLE)");
    lctx_require_state(header.near_rows == (n_seq > 0 ? shape.near_rows : method.near_window()),
                       "it was written with another n_batch or n_ubatch");
    lctx_require_state(header.n_seq == n_seq, "it holds " + std::to_string(header.n_seq) + " sequences");
}

void lctx_read_state(lctx_cache_parts & parts, llama_io_read_i & io, int32_t seq_id) {
    lctx_require_state(seq_id < parts.seqs.size(), "there is no sequence " + std::to_string(seq_id));
    const int32_t first = std::max(seq_id, 0), end = seq_id < 0 ? parts.seqs.size() : seq_id + 1;
    const auto forget = [&] {
        for (int32_t seq = first; seq < end; seq++) {
            parts.truncate(seq, 0);
        }
    };
    forget();
    try {
        lctx_check_header(parts, io, end - first);
        for (int32_t seq = first; seq < end; seq++) {
            read_sequence(parts, io, seq);
        }
    } catch (...) {
        forget();
        throw;
    }
}
