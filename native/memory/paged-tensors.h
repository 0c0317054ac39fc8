// Rows in pages: the pools of a store, and the table that says which page holds a block of a head of a sequence.
//
// The host has page numbers, the device has the rows. Taking a page waits for nothing: entries of the table are sent to
// the device in the order of the graphs.
#pragma once

#include "device-tensors.h"
#include "page-numbers.h"

#include <cstdint>
#include <string>
#include <vector>

// Block i of a head is its cells [64 i, 64 i + 64). Functions that return a string: why it cannot be, empty when it was
// done.
class lctx_paged_tensors : public lctx_device_tensors {
  public:
    int32_t page(int32_t seq, int32_t head, int32_t block) const;
    std::string take_page(int32_t seq, int32_t head, int32_t block);
    // Copy a page that other sequences read too, before this one writes to it.
    std::string own_page(int32_t seq, int32_t head, int32_t block);
    void share_pages(int32_t src, int32_t dst, int32_t head, int32_t n_block);
    void drop_pages(int32_t seq, int32_t head, int32_t first, int32_t end);
    // Commit what n more pages need; they are taken later.
    std::string promise_pages(int32_t n);
    // Free pages belong to the device again, except those that the next rows need. Where a grain holds many pages, held
    // ones move together when too many free ones lie between them.
    void return_pages();
    const lctx_page_numbers & pages() const { return pages_; }
    // A graph is about to run: the device has to know where the rows lie.
    void begin_graph();

    const int32_t n_head;           // KV heads of all layers
    ggml_tensor * table = nullptr;  // [n_page_max, n_head, n_seq]

  protected:
    lctx_paged_tensors(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, lctx_work & work, int32_t n_head,
                       int32_t n_page)
        : lctx_device_tensors(dev, buft, work), n_head(n_head), n_page_(n_page), pages_(n_page) {}
    ~lctx_paged_tensors() = default;

    // A pool of rows of n channels.
    ggml_tensor * add_pool(const char * name, ggml_type type, int64_t n);
    // No block has a page; the table has its memory.
    void clear_table();
    // Entries that changed, on their way to the device.
    void upload_table();

  private:
    size_t entry(int32_t seq, int32_t head, int32_t block) const;
    void set_page(int32_t seq, int32_t head, int32_t block, int32_t page);
    void set_entry(size_t i, int32_t page);
    bool commit_page(int32_t page);
    void copy_page(int32_t from, int32_t to);
    void pack_pages(int32_t n_keep);

    const int32_t n_page_;
    lctx_page_numbers pages_;
    std::vector<ggml_tensor *> pools_;
    int32_t n_promised_ = 0;
    int32_t * table_ = nullptr;    // where the host keeps the table: its tensor on the CPU
    std::vector<int32_t> copy_;    // else here
    std::vector<size_t> changed_;  // and the entries that the device does not know
};
