// The sequences of a cache as the host knows them: how many rows each has, what is left of them, and what can be taken
// back. There are no rows here and no devices.
#pragma once

#include "../methods/method.h"
#include "placement.h"

#include <cstdint>
#include <string>
#include <vector>

struct llama_batch;
struct llama_ubatch;
class llama_io_read_i;
class llama_io_write_i;

// Between two calls (lctx_sequences::why_unsound):
//
//   rows       0 <= n_pos <= n_ctx.
//   pages      Rows in [n_sink, first_live) have none. first_live begins a page, and no query from n_pos on reads rows
//   before it. near keys  Those of rows before first_near were overwritten; those in the window of the next query are
//   there. queries    open[h] is a chunk that has begun, or -1, and not twice the same. The chunk that is not complete
//   is one of them. evictions  Rows before evicted_to were judged: the last border before the end, or the end where
//   that is a border. Queries before
//              voted_to may have voted. The votes of those from undo_from on can be taken back: it is -1, or in
//              [evicted_to, voted_to). Where the rule waits for a replay, voted_to is evicted_to, and nothing can be
//              taken back.
//   spans      The first begins at row 0, and each of the others after the one before it and before n_pos.
struct lctx_sequence {
    int32_t n_pos = 0;
    int32_t first_live = 0;
    int32_t first_near = 0;
    int32_t open[2] = {-1, -1};  // of the ring of queries, which has two halves of one chunk each
    int32_t kept_half = 0;       // the half that may not be overwritten, because the batch may be taken back to it
    int32_t evicted_to = 0;
    int32_t voted_to = 0;
    int32_t undo_from = -1;
    int32_t replay_from = INT32_MAX;  // queries from here on vote in a replay
    int32_t piece_first = 0;  // of the text, they read the rows [piece_first, piece_end) and the first ones; none: all
    int32_t piece_end = 0;
    bool shares = false;  // pages may have other owners
    std::vector<lctx_row_span> spans = {{0, 0}};

    int32_t half(int32_t chunk) const { return open[0] == chunk ? 0 : open[1] == chunk ? 1 : -1; }
};

class lctx_sequences {
  public:
    explicit lctx_sequences(const lctx_placement & placement);

    int32_t size() const { return (int32_t)seqs_.size(); }
    bool has(int32_t seq) const { return seq >= 0 && seq < size(); }
    lctx_sequence & operator[](int32_t seq) { return seqs_[seq]; }
    const lctx_sequence & operator[](int32_t seq) const { return seqs_[seq]; }
    int32_t n_pos(int32_t seq) const { return seqs_[seq].n_pos; }
    // The next position of every sequence.
    std::vector<int32_t> lengths() const;
    // Return what of the comment above a sequence contradicts; empty when nothing.
    std::string why_unsound(const lctx_sequence & s) const;

    // going back
    // Return why the sequence cannot be cut back to p tokens; empty when it can.
    std::string why_not_back_to(int32_t seq, int32_t p) const;
    // The longest prefix of at most n rows that the sequence can be cut back to.
    int32_t restorable(int32_t seq, int32_t n) const;
    // The last position up to p that a sequence can be cut back to, however long it has become, where heads do not
    // evict.
    int32_t cut_before(int32_t p) const { return has_open() ? p - p % chunks_->chunk_size : p; }
    // Forget what lies beyond the end.
    void forget_beyond(int32_t seq);
    // The first row that no query from p - n_batch on makes dead: one batch may still be taken back. It begins a page.
    int32_t first_live(int32_t p) const;
    // The first near key that a slice of rows [first, end) has.
    int32_t first_near(int32_t first, int32_t end) const;

    // votes and evictions (votes.cpp)
    // Tokens from position p on, p included, before a sequence evicts.
    int32_t until_border(int32_t p) const;
    bool is_due(int32_t seq) const;
    // Of n tokens from position p on, how many a batch may take that can be taken back whole.
    int32_t step(int32_t p, int32_t n) const;
    // Return whether the sequence evicts when it grows to n_pos rows: a border lies before the last of them.
    bool evicts_before(int32_t seq, int32_t n_pos) const;
    // The sequences of a batch that evict before it.
    std::vector<int32_t> due_in(const llama_batch & batch) const;
    // Before a ubatch: whose queries vote, and from where on their votes can be taken back.
    void note_votes(const llama_ubatch & ubatch);
    // The sequence is cut to n_pos rows: no query after them has voted. True when devices have votes to take back.
    bool take_votes_back(int32_t seq, int32_t n_pos);
    // All rows of a sequence were judged.
    void note_eviction(int32_t seq);
    // Return who votes, of the ubatch that was prepared last.
    const std::vector<lctx_voter> & voters() const { return voters_; }

    // the open chunk (open.cpp)
    bool has_open() const { return chunks_ && chunks_->by_attention(); }
    // A batch begins: what its first rows continue must outlive it.
    void keep_open();
    void assign_open(const llama_ubatch & ubatch);
    // Return where the queries of the ubatch that was prepared last go: lctx_chunk_row::open of every token.
    const std::vector<int32_t> & open_rows() const { return open_rows_; }

    // spans (spans.cpp)
    // Return how many rows from the beginning have read all rows before them, and no other.
    int32_t n_exact(int32_t seq) const;
    // Return why a sequence cannot consist of these; empty when it can.
    std::string why_no_spans(const std::vector<lctx_row_span> & spans) const;
    // The spans when rows [first, end) have left.
    std::vector<lctx_row_span> spans_without(int32_t seq, int32_t first, int32_t end) const;
    // The spans when rows come to the end that were rotated to positions from p on.
    std::vector<lctx_row_span> spans_with(int32_t seq, int32_t p) const;
    void write_spans(llama_io_write_i & io, int32_t seq) const;
    // Those of a saved sequence, or the one that other methods have. Throws lctx_refusal.
    std::vector<lctx_row_span> read_spans(llama_io_read_i & io, int32_t n_pos) const;

  private:
    std::string why_unsound_evictions(const lctx_sequence & s) const;

    const lctx_method & method_;
    const lctx_chunks * chunks_;  // of the method, or nullptr
    const lctx_retain * retain_;  // of the method, or nullptr
    const lctx_kv_sizes & sizes_;
    const int32_t near_rows_;
    std::vector<lctx_sequence> seqs_;
    std::vector<int32_t> open_rows_;
    std::vector<lctx_voter> voters_;
};
