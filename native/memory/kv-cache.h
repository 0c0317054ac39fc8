// The KV cache of our methods: cells of K and V in pages per layer and KV head, one page list per sequence.
//
// It holds the layers that it was given: those with full attention (claim.h). A head that evicts holds rows of its own (ops/retain.h).
// Evictions are due at borders and done when the next token comes, so that the last batch can be taken back.
//
// Sequences that were copied share their full pages; a page is copied before somebody else's row would be written to it.
// Rows lie in stores, one per device that has layers (kv-store.h); sequences, and what may be done with them, are the same for all.
// What cannot be done is refused with a message: bool operations return false, state operations throw, and what a void operation asks
// marks the cache broken, so that the next batch fails with the message until it is cleared. Never a silently wrong cache.
#pragma once

#include "../claim.h"
#include "../counts.h"
#include "../methods/method.h"
#include "budgets.h"
#include "centers.h"
#include "ggml-backend.h"
#include "kv-store.h"
#include "llama-batch.h"
#include "llama-cparams.h"
#include "llama-memory.h"
#include "llama-model.h"
#include "state-io.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// What of a context turns its keys, beside the model and the method.
struct lctx_rope_settings {
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    uint32_t n_ctx_orig;
};

// The rows of a part.
struct lctx_part_range {
    int32_t first, end;
};

// What of a part goes to a head: rows [first, first + n) of the n_row that it has there, behind the cells [0, to).
struct lctx_part_take {
    int32_t n_row, first, n, to;
};

struct lctx_part {
    lctx_part_range at;
    std::vector<std::vector<int32_t>> rows;  // of every KV head, from at.first on; empty: every head has all
};

// How a sequence grows: by n rows, of which each head holds n_each (in the order of its layers; empty: all of them). Those before
// first_live are rows that no query reads any more, but for the first ones.
struct lctx_growth {
    int32_t n;
    std::vector<int32_t> n_each;
    int32_t first_live;

    int32_t held(size_t head) const { return n_each.empty() ? n : n_each[head]; }
};

// What is saved of a sequence: all of it in a state, or rows [first, end) in a part.
struct lctx_extent {
    lctx_plane_saved saved;
    int32_t first, end;

    bool is_part() const { return saved == lctx_plane_saved::in_parts; }
};

class lctx_kv_cache {
  public:
    // layers: those it holds. kv_limit: most bytes that kv usage may report, 0: none. kv_offload: bytes of the devices for pages that lie
    // close, 0: all do, UINT64_MAX: twice what a token chooses. Throws lctx_refusal when the pools do not fit a device or the types do not
    // fit the heads.
    lctx_kv_cache(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams,
                  const std::vector<lctx_claimed> & layers, std::unique_ptr<lctx_method> method, uint32_t n_ctx, uint64_t kv_limit,
                  uint64_t kv_offload);

    // a batch on its way
    // Do what is due before the batch and take the memory that it needs. The reason when it cannot be evaluated, with its status.
    std::string admit(const llama_batch & batch, llama_memory_status & status);
    // The next position of every sequence.
    std::vector<int32_t> lengths() const;
    // Tokens from position p on, p included, before a sequence evicts.
    int32_t until_border(int32_t p) const;
    // Give every token of the ubatch its row: pages are taken here. admit has seen that there are enough.
    bool place(const llama_ubatch & ubatch);

    // sequences
    void clear();
    // Why the sequence cannot be cut back to p tokens; empty when it can.
    std::string why_not_back_to(int32_t seq, int32_t p) const;
    // The longest prefix of at most n rows that the sequence can be cut back to.
    int32_t restorable(int32_t seq, int32_t n) const;
    // The last position up to p that a sequence can be cut back to, however long it has become, where heads do not evict.
    int32_t place(int32_t p) const { return has_open() ? p - p % chunks_->chunk_size : p; }
    // Cut a sequence back; why_not_back_to has nothing against it.
    void truncate(int32_t seq, int32_t n_pos);
    // Make dst the first n_pos rows of src; false with take_error() when that cannot be.
    bool copy(int32_t src, int32_t dst, int32_t n_pos);
    int32_t n_seq() const { return n_seq_; }
    int32_t n_pos(int32_t seq) const { return seqs_[seq].n_pos; }
    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const;
    // seq_id < 0: all sequences. Throw lctx_refusal.
    void state_write(llama_io_write_i & io, int32_t seq_id) const;
    void state_read(llama_io_read_i & io, int32_t seq_id);
    // Why a sequence has no parts; empty where its rows stay as they were stored.
    std::string why_no_parts() const;
    // Rows [first, end) of a sequence and what goes with them: first begins a page, end is where it can be cut. Throws lctx_refusal.
    void part_write(llama_io_write_i & io, int32_t seq, int32_t first, int32_t end) const;
    // Append a part to the sequence. Throws; what was taken for it is there then, up to its end.
    void part_read(lctx_state_reader & io, int32_t seq);
    // Append n rows of a part behind its first `skip`, wherever it was read, as a span (spans.cpp). As part_read otherwise.
    void part_place(lctx_state_reader & io, int32_t seq, int32_t skip, int32_t n);
    // How many rows from the beginning have read all rows before them, and no other.
    int32_t n_exact(int32_t seq) const;
    // Forget rows [first, end) of a sequence; those behind them move down. False with take_error(), and nothing changed.
    bool drop(int32_t seq, int32_t first, int32_t end);
    // What the sequence is put together of: at least one span, the first from row 0 on.
    const std::vector<lctx_row_span> & spans(int32_t seq) const { return seqs_[seq].spans; }

    // errors
    // Remember the reason of a refusal; false.
    bool refuse(const std::string & reason) const;
    // No batch is evaluated until clear().
    void break_with(const std::string & reason);
    // The reason of the last refusal, told once: a later failure has a reason of its own.
    std::string take_error() { return std::exchange(error_, {}); }

    // compression (compress.cpp), where the rule waits for it
    // Queries of tokens from now on vote for the rows before them, until end_replay(); votes of before are forgotten. Returns after how
    // many of them at most the sequence can still be cut back to its end of now. Throws lctx_refusal.
    int32_t begin_replay(int32_t seq);
    void end_replay(int32_t seq) { seqs_[seq].replay_from = INT32_MAX; }
    // Keep so many of the rows of a full cache, those of all heads together with the best votes; ends the replay. False: refused.
    bool compress(int32_t seq, double share);

    // for the graph
    const lctx_method & method() const { return *method_; }
    // A layer that this cache serves: it has rows here, or reads those of an earlier layer.
    bool serves(int32_t il) const { return il < (int32_t)source_.size() && source_[il] >= 0; }
    // The layer whose rows it reads: itself, or an earlier one.
    int32_t source(int32_t il) const { return source_[il]; }
    int32_t head_dim_k() const { return shape_.head_dim_k; }
    int32_t head_dim_v() const { return shape_.head_dim_v; }
    // Latent attention: where the values begin in a key; -1: they have rows of their own.
    int32_t v_offset() const { return shape_.v_offset; }
    lctx_layer layer(ggml_context * ctx, int32_t il) const;
    const lctx_kv_store & store(int32_t il) const { return *layers_[source_[il]].store; }
    const std::vector<std::unique_ptr<lctx_kv_store>> & stores() const { return stores_; }
    int32_t first_layer(const lctx_kv_store & store) const;
    // The bias of the keys of a layer that stores them, F32, where its mean is subtracted (centers.h); else nullptr.
    const ggml_tensor * key_bias(int32_t il) const { return source_[il] == il ? key_bias_[il] : nullptr; }
    lctx_centers & centers() const { return *centers_; }
    // A graph of the context is being built: where it runs.
    void attach(ggml_backend_sched_t sched) const;
    // A graph is about to run: the devices have to know where the rows lie.
    void begin_graph() const;

    // From which row on queries choose, see lctx_method. Throws lctx_refusal.
    void select_from(int32_t from) { method_->select_from(from); }
    // Heads choose in every graph from now on, where their queries read everything too; for traces.
    void always_select(bool on) { always_selects_ = on; }
    // Units that lie close are brought as choices ask for them.
    // So they do where results may not depend on the other tokens of a batch, unless no query of the context can choose.
    bool always_selects() const { return always_selects_ || shape_.n_staged > 0 || (is_fixed_ && method_->selects(n_ctx_ - 1)); }
    // Results of a token do not depend on what is computed beside it (ops/fixed.h).
    void fix(bool on) { is_fixed_ = on; }
    bool is_fixed() const { return is_fixed_; }

    // for the API
    // What was chosen and why, and which kernels run where on rows of which types.
    std::string full_why() const;
    void usage(lctx_kv_info & info, int32_t * rows) const;
    lctx_offload_info offload() const;
    // What its rows take when the text fills n_ctx, where heads evict at most (with corm at least): f(device, bytes).
    void each_size(const std::function<void(ggml_backend_dev_t, const lctx_sizes &)> & f) const;
    // The rows that a head holds, ascending, and their scores: room for n_max; returns their number.
    int32_t held_rows(int32_t seq, int32_t il, int32_t head, int32_t * rows, int32_t * scores, int32_t n_max) const;
    // Of n tokens from position pos on, how many a batch may take that can be taken back whole.
    int32_t step(int32_t pos, int32_t n) const;
    // What the host has done so far; n_built is the context's to know.
    lctx_work & work() const { return work_; }
    // Where the queries of the ubatch that was placed last go: lctx_chunk_row::open of every token.
    const std::vector<int32_t> & open_rows() const { return open_rows_; }
    // Who votes, of the ubatch that was placed last.
    const std::vector<lctx_voter> & voters() const { return voters_; }

  private:
    struct sequence {
        int32_t n_pos = 0;       // rows stored
        int32_t first_live = 0;  // rows in [n_sink, first_live) lost their pages
        int32_t first_near = 0;  // near keys before this row were overwritten
        // The ring of queries has two halves of one chunk each: the chunk whose rows each holds from its first on, and the half
        // that may not be overwritten, because the batch may be taken back to it.
        int32_t open[2] = {-1, -1};
        int32_t kept_half = 0;
        // Eviction: rows before evicted_to were judged; queries before voted_to may have voted; the votes of queries from undo_from
        // on can be taken back.
        int32_t evicted_to = 0;
        int32_t voted_to = 0;
        int32_t undo_from = -1;
        int32_t replay_from = INT32_MAX;  // queries from here on vote in a replay
        bool shares = false;              // pages may have other owners
        std::vector<lctx_row_span> spans = {{0, 0}};

        int32_t half(int32_t chunk) const { return open[0] == chunk ? 0 : open[1] == chunk ? 1 : -1; }
    };

    struct layer_place {
        lctx_kv_store * store = nullptr;
        lctx_layer_heads heads = {};  // in the store; none: the layer has no rows here
    };

    // A run of bytes: offset and size in the tensor of a plane.
    using run_visitor = std::function<void(lctx_kv_store &, const lctx_plane &, size_t, size_t)>;

    static int32_t n_block(int32_t n_rows) { return lctx_kv_shape::n_block(n_rows); }
    void find_key_bias(const llama_model & model);
    int32_t live_blocks() const;
    int32_t n_page_head() const;
    int32_t units_read(int32_t n_chosen) const;
    int32_t n_staged(uint64_t kv_offload) const;
    void allocate(const llama_model & model, const std::vector<lctx_claimed> & layers, bool offload);
    // f(store, head in the store) for the KV heads of all layers.
    template <typename F> void each_head(F && f) const {
        for (const layer_place & layer : layers_) {
            for (int32_t head = layer.heads.first; head < layer.heads.first + layer.heads.n; head++) {
                f(*layer.store, head);
            }
        }
    }

    // blocks.cpp: the pages of a sequence; row i is cell i unless heads evict
    int32_t n_dead(int32_t seq) const;
    int64_t n_held_page() const;
    int32_t pages_needed(const lctx_kv_store & store, const std::vector<int32_t> & n_pos) const;
    bool promise(const llama_batch & batch);
    void drop_dead(int32_t seq, int32_t p);
    // Rows in [n_sink, first_live) have lost their pages.
    bool is_dead(int32_t block, int32_t first_live) const {
        return block >= n_block(method_->n_sink()) && (block + 1) * LCTX_PAGE_ROWS <= first_live;
    }
    template <typename F> void each_new(int32_t seq, const lctx_growth & by, F && f);
    std::string why_no_pages(int32_t seq, const lctx_growth & by);
    // Room for more rows, in pages that only this sequence writes to. Empty when it is there; else the reason, and nothing has changed.
    std::string grow(int32_t seq, const lctx_growth & by);
    // Take growth back.
    void shrink(int32_t seq, const lctx_growth & by);
    // grow, for rows that the host writes: nothing runs on the devices then.
    std::string grow_to_write(int32_t seq, const lctx_growth & by);
    bool copy_prefix(int32_t src, int32_t dst, int32_t n_pos);

    // evict.cpp: votes and evictions
    bool is_due(int32_t seq) const;
    bool evicts_before(int32_t seq, int32_t n_pos) const;
    std::vector<int32_t> due_in(const llama_batch & batch) const;
    bool settle(const std::vector<int32_t> & seqs);
    bool own_all(int32_t seq);
    void note_votes(const llama_ubatch & ubatch);
    void take_votes_back(int32_t seq, int32_t n_pos);
    void forget_evictions(int32_t seq);

    // compress.cpp: who keeps how much
    void add_contenders(lctx_kv_store & store, int32_t seq, const lctx_layer_heads & heads, std::vector<lctx_contender> & contenders) const;
    void share_layers(int32_t seq);
    std::string why_not_compress(int32_t seq) const;

    // chunks.cpp: the index, summaries, and the queries of the open chunk
    void index_rows(int32_t seq, int32_t first, int32_t end);
    bool has_open() const { return chunks_ && chunks_->by_attention(); }
    void keep_open();
    void place_open(const llama_ubatch & ubatch);
    void forget_open(int32_t seq);

    // kv-planes.cpp: loops over all planes
    lctx_extent whole(int32_t seq) const { return {lctx_plane_saved::in_states, 0, seqs_[seq].n_pos}; }
    void each_page_run(lctx_kv_store & store, int32_t seq, int32_t head, int32_t first, int32_t end, const run_visitor & f) const;
    template <typename F>
    void each_entry_run(const lctx_plane & plane, int32_t seq, int32_t n_gone, const lctx_extent & what, F && f) const;
    void each_run(int32_t seq, const lctx_extent & what, const run_visitor & f) const;
    void each_layer_run(const layer_place & layer, int32_t seq, const lctx_extent & what, lctx_plane_key group,
                        const run_visitor & f) const;
    void copy_planes(int32_t src, int32_t dst);

    std::string check_batch(const llama_batch & batch, llama_memory_status & status) const;
    std::string check_room(const std::vector<int32_t> & n_pos) const;
    std::string check_limit(int64_t n_held_page, const std::vector<int32_t> & n_pos) const;
    int32_t most_cells() const;
    uint64_t bytes(int64_t n_held_page, const std::vector<int32_t> & n_pos) const;
    void note_peak();

    // state.cpp: save and restore
    void write_sequence(llama_io_write_i & io, int32_t seq) const;
    void check_header(llama_io_read_i & io, int32_t n_seq) const;
    void read_sequence(llama_io_read_i & io, int32_t seq);
    std::string why_no_values(const sequence & s, const lctx_plane & plane, const std::vector<uint8_t> & bytes) const;
    std::string why_no_state(const sequence & s) const;
    bool is_score(int32_t score, int32_t voted_to) const;
    void write_header(llama_io_write_i & io, int32_t n_seq) const;

    // spans.cpp
    void cut_spans(int32_t seq);
    std::string why_no_span(const std::vector<lctx_row_span> & spans) const;
    std::vector<lctx_row_span> spans_without(int32_t seq, int32_t first, int32_t end) const;
    void move_rows(int32_t seq, int32_t first, int32_t end);
    void write_spans(llama_io_write_i & io, int32_t seq) const;
    std::vector<lctx_row_span> read_spans(llama_io_read_i & io, int32_t n_pos) const;

    // parts.cpp
    int32_t first_near(int32_t first, int32_t end) const;
    // Parts say which rows each head has: heads forget some when a text is compressed.
    bool has_lists() const { return retain_ && retain_->waits() && method_->n_span() > 1; }
    static void part_require(bool ok, const std::string & reason);  // throws lctx_refusal
    lctx_part part_begin(lctx_state_reader & io) const;
    void write_lists(llama_io_write_i & io, int32_t seq, const lctx_part_range & at) const;
    void read_lists(lctx_state_reader & io, lctx_part & part) const;
    static const uint8_t * part_rows(lctx_state_reader & io, const ggml_tensor * t, int64_t n);
    static void part_finish(const lctx_state_reader & io);

    // append.cpp
    void append_rows(lctx_state_reader & io, int32_t seq, const lctx_part & part, int32_t skip, int32_t n);
    void note_rows(int32_t seq, int32_t n, const lctx_part & part, int32_t skip, const std::vector<lctx_part_take> & takes);

    std::unique_ptr<lctx_method> method_;
    const lctx_chunks * chunks_;  // of the method, or nullptr
    const lctx_retain * retain_;  // of the method, or nullptr
    uint64_t kv_limit_;           // bytes, 0: none
    int32_t n_ctx_;               // rows of one sequence
    int32_t n_rows_all_;          // rows of all sequences together
    int32_t n_ubatch_, n_batch_, n_seq_, n_threads_;
    bool has_sections_;  // of RoPE: a token of a picture has several positions
    lctx_rope_settings rope_;
    lctx_kv_shape shape_ = {};
    int32_t n_head_total_ = 0;        // KV heads of all layers
    int32_t n_query_head_total_ = 0;  // query heads of all layers
    std::vector<std::unique_ptr<lctx_kv_store>> stores_;
    std::unique_ptr<lctx_centers> centers_;
    std::vector<const ggml_tensor *> key_bias_;  // by layer
    std::vector<layer_place> layers_;            // of all layers of the model
    std::vector<int32_t> source_;                // the layer whose rows each reads, -1: another memory serves it
    bool always_selects_ = false, is_fixed_ = false;
    std::vector<int32_t> open_rows_;
    std::vector<lctx_voter> voters_;
    std::vector<sequence> seqs_;
    uint64_t peak_bytes_ = 0;
    mutable lctx_work work_ = {};
    std::string broken_;
    mutable std::string error_;
};
