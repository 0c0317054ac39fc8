// Knows which pages the sequences hold, and limits their bytes: block i of a head is its cells [64 i, 64 i + 64), and
// the table of its store says which page that is. Functions that return a string return why it cannot be, empty when it
// was done.
#pragma once

#include "placement.h"
#include "sequences.h"

#include <functional>
#include <string>
#include <vector>

// Lets a sequence grow by n rows, of which each head holds n_each (in the order of its layers; empty: all of them).
// Those before first_live are rows that no query reads any more, except the first ones.
struct lctx_growth {
    int32_t n;
    std::vector<int32_t> n_each;
    int32_t first_live;

    int32_t held(size_t head) const { return n_each.empty() ? n : n_each[head]; }
};

class lctx_blocks {
  public:
    // kv_limit: most bytes that usage may report, 0: none.
    lctx_blocks(const lctx_placement & placement, lctx_sequences & seqs, uint64_t kv_limit)
        : placement_(placement), seqs_(seqs), kv_limit_(kv_limit) {}

    // Return why the sequences cannot grow to n_pos rows each; empty when they can.
    std::string why_no_room(const std::vector<int32_t> & n_pos) const;
    // Commit what they need for that, where memory has to be.
    std::string promise(const std::vector<int32_t> & n_pos) const;
    // Room for more rows, in pages that only this sequence writes to. Nothing has changed when it cannot be.
    std::string grow(int32_t seq, const lctx_growth & by);
    // Grow for rows that the host writes: nothing runs on the devices then.
    std::string grow_to_write(int32_t seq, const lctx_growth & by);
    // Take growth back.
    void shrink(int32_t seq, const lctx_growth & by);
    // Return the pages of rows that no query reads any more.
    void drop_dead(int32_t seq);
    // Keep the pages of the first n rows.
    void cut(int32_t seq, int32_t n_pos);
    // The pages of the first n rows of src belong to dst too, which is empty.
    std::string share(int32_t src, int32_t dst, int32_t n_pos);
    // Rows move inside the pages of a sequence, so no other sequence may read them.
    std::string own_all(int32_t seq);
    // Return what of the tables of pages contradicts the sequences; empty when nothing.
    std::string why_unsound() const;

    // Return why the sequences cannot have lengths n_pos with n_page pages; empty when they can.
    std::string check_limit(int64_t n_page, const std::vector<int32_t> & n_pos) const;
    std::string check_lengths(const std::vector<int32_t> & n_pos) const { return check_limit(n_held_page(), n_pos); }
    void note_peak();
    // Report what is held. rows: [n_layer][n_head_kv], or nullptr.
    void usage(lctx_kv_info & info, int32_t * rows) const;
    // Call f(device, bytes) for what the rows take when the text fills n_ctx, where heads evict at most (with corm at
    // least).
    void each_size(const std::function<void(ggml_backend_dev_t, const lctx_sizes &)> & f) const;
    // Blocks before the window, whose pages are gone: the same for all heads.
    int32_t n_dead(int32_t seq) const;
    // The first of them.
    int32_t first_dead() const { return n_block(placement_.method().n_sink()); }

  private:
    static int32_t n_block(int32_t n_rows) { return lctx_kv_shape::n_block(n_rows); }
    bool is_dead(int32_t block, int32_t first_live) const {
        return block >= first_dead() && (block + 1) * LCTX_PAGE_ROWS <= first_live;
    }
    template <typename F> void each_new(int32_t seq, const lctx_growth & by, F && f) const;
    template <typename F> void each_block(int32_t seq, F && f) const;
    int64_t n_held_page() const;
    int32_t pages_needed(const lctx_device_store & store, const std::vector<int32_t> & n_pos) const;
    std::string why_no_pages(int32_t seq, const lctx_growth & by) const;
    int32_t most_cells() const;
    uint64_t bytes(int64_t n_page, const std::vector<int32_t> & n_pos) const;

    const lctx_placement & placement_;
    lctx_sequences & seqs_;
    const uint64_t kv_limit_;  // bytes, 0: none
    uint64_t peak_bytes_ = 0;
};
