#include "context-memory.h"

#include "llama-impl.h"

#include <algorithm>

namespace {

// All checkpoints of a context together, but each sequence may have two: where its last text begins, and near its end.
constexpr uint64_t CHECKPOINT_BYTES = 1ull << 30;
// Those that a saved state has at most: of the last text and of the answer after it.
constexpr size_t MOST_SAVED = 4;

// each: bytes of one checkpoint of every sequence.
size_t within_bytes(int32_t n_checkpoint, uint64_t each) {
    return std::clamp<uint64_t>(CHECKPOINT_BYTES / std::max<uint64_t>(1, each), 2, std::max(2, n_checkpoint));
}

}  // namespace

lctx_context_memory::lctx_context_memory(std::unique_ptr<lctx_kv_cache> cache,
                                         std::unique_ptr<lctx_foreign_memory> foreign, int32_t n_checkpoint)
    : cache_(std::move(cache)),
      foreign_(std::move(foreign)),
      n_checkpoint_(foreign_ ? within_bytes(n_checkpoint, foreign_bytes()) : 0),
      checkpoints_(cache_->sequences().size()) {}

// ---- sequences ----

void lctx_context_memory::clear(bool data) {
    cache_->clear();
    if (foreign_) {
        foreign_->memory().clear(data);
    }
    std::fill(checkpoints_.begin(), checkpoints_.end(), std::vector<saved>());
}

const lctx_context_memory::saved * lctx_context_memory::find_checkpoint(int32_t seq, int32_t p) const {
    const auto & all = checkpoints_[seq];
    const auto it = std::find_if(all.begin(), all.end(), [&](const saved & s) { return s.pos == p; });
    return it == all.end() ? nullptr : &*it;
}

std::string lctx_context_memory::why_not_back_to(int32_t seq, int32_t p) const {
    const std::string why = cache_->sequences().why_not_back_to(seq, p);
    if (!why.empty() || !foreign_ || foreign_->can_go_back(seq, p) || find_checkpoint(seq, p)) {
        return why;
    }
    return "layers with a window or a recurrent state cannot go back to position " + std::to_string(p) +
           ": there is no checkpoint; evaluate the prefix again";
}

void lctx_context_memory::empty(int32_t seq) {
    cache_->truncate(seq, 0);
    if (foreign_) {
        foreign_->remove(seq, 0);
    }
    checkpoints_[seq].clear();
}

// Make dst, whose rows in the cache are there, end at the checkpoint of src; false, and dst is empty, when llama.cpp
// cannot read it.
bool lctx_context_memory::restore(int32_t src, int32_t dst, int32_t p) {
    try {
        foreign_->restore(src, dst, p, *find_checkpoint(src, p)->bytes);
        return true;
    } catch (const std::exception & e) {
        empty(dst);
        return cache_->refuse(std::string("the checkpoint could not be restored, the sequence is empty: ") + e.what());
    }
}

// why_not_back_to has nothing against it.
bool lctx_context_memory::cut(int32_t seq, int32_t p) {
    if (p == 0) {
        empty(seq);
        return true;
    }
    cache_->truncate(seq, p);
    if (!foreign_) {
        return true;
    }
    if (foreign_->can_go_back(seq, p)) {
        foreign_->remove(seq, p);
    } else if (!restore(seq, seq, p)) {
        return false;
    }
    auto & all = checkpoints_[seq];
    all.erase(std::remove_if(all.begin(), all.end(), [&](const saved & s) { return s.pos > p; }), all.end());
    return true;
}

bool lctx_context_memory::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (seq_id < 0) {
        bool done = true;
        for (int32_t seq = 0; seq < cache_->sequences().size(); seq++) {
            done = seq_rm(seq, p0, p1) && done;
        }
        return done;
    }
    if (seq_id >= cache_->sequences().size()) {
        return true;  // nothing is ever stored there
    }
    p0 = std::max(p0, 0);
    const int32_t n_pos = cache_->sequences().n_pos(seq_id);
    if (p0 >= n_pos || (p1 >= 0 && p1 <= p0)) {
        return true;
    }
    if (p1 >= 0 && p1 < n_pos) {
        return cache_->refuse("only the end of a sequence can be removed, not positions " + std::to_string(p0) +
                              " .. " + std::to_string(p1));
    }
    const std::string why = why_not_back_to(seq_id, p0);
    if (!why.empty()) {
        return cache_->refuse(why);
    }
    return cut(seq_id, p0);
}

int32_t lctx_context_memory::restorable(int32_t seq, int32_t n) const {
    const int32_t most = cache_->restorable(seq, n);
    if (!foreign_ || most == 0 || most == cache_->sequences().n_pos(seq) || foreign_->can_go_back(seq, most)) {
        return most;
    }
    const auto & all = checkpoints_[seq];
    for (auto it = all.rbegin(); it != all.rend(); ++it) {
        if (it->pos <= n && cache_->restorable(seq, it->pos) == it->pos) {
            return it->pos;
        }
    }
    return 0;
}

void lctx_context_memory::withdraw(int32_t seq, int32_t n_pos) {
    if (!seq_rm(seq, n_pos, -1)) {
        seq_rm(seq, restorable(seq, n_pos), -1);
    }
}

bool lctx_context_memory::copy(int32_t src, int32_t dst, int32_t n_pos) {
    const bool known = src >= 0 && src < cache_->sequences().size();
    n_pos = !known ? 0 : n_pos < 0 ? cache_->sequences().n_pos(src) : std::min(n_pos, cache_->sequences().n_pos(src));
    const bool whole = known && n_pos == cache_->sequences().n_pos(src);
    const std::string why = known && !whole ? why_not_back_to(src, n_pos) : "";
    if (!why.empty()) {
        return cache_->refuse(why);
    }
    if (!cache_->copy(src, dst, n_pos)) {
        return false;
    }
    if (!foreign_ || src == dst) {
        return true;
    }
    if (whole || foreign_->can_go_back(src, n_pos)) {
        foreign_->copy(src, dst, n_pos);
    } else if (!restore(src, dst, n_pos)) {
        return false;
    }
    checkpoints_[dst].clear();
    for (const saved & s : checkpoints_[src]) {
        if (s.pos <= n_pos) {
            checkpoints_[dst].push_back(s);
        }
    }
    return true;
}

void lctx_context_memory::checkpoint(int32_t seq) {
    const int32_t n_pos = cache_->sequences().n_pos(seq);
    auto & all = checkpoints_[seq];
    if (!foreign_ || n_pos == 0 || (!all.empty() && all.back().pos == n_pos)) {
        return;
    }
    all.push_back({n_pos, std::make_shared<const std::vector<uint8_t>>(foreign_->save(seq))});
    if (all.size() > n_checkpoint_) {
        // the one that is least missed: whose neighbors are nearest to each other. The newest stays.
        size_t least = 0;
        const auto gap = [&](size_t i) { return all[i + 1].pos - (i > 0 ? all[i - 1].pos : 0); };
        for (size_t i = 1; i + 1 < all.size(); i++) {
            least = gap(i) < gap(least) ? i : least;
        }
        all.erase(all.begin() + (std::ptrdiff_t)least);
    }
}

void lctx_context_memory::seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) {
    if (p0 > 0) {
        cache_->break_with("seq_cp copies a sequence from its beginning, not from position " + std::to_string(p0));
    } else if (!copy(src, dst, p1)) {
        cache_->break_with("seq_cp: " + cache_->take_error());
    }
}

void lctx_context_memory::seq_keep(llama_seq_id seq_id) {
    for (int32_t seq = 0; seq < cache_->sequences().size(); seq++) {
        if (seq != seq_id) {
            empty(seq);
        }
    }
}

void lctx_context_memory::seq_add(llama_seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    if (shift != 0 && p0 != p1) {
        cache_->break_with("seq_add is not available for a context with a method: positions are the method's business");
    }
}

void lctx_context_memory::seq_div(llama_seq_id, llama_pos p0, llama_pos p1, int d) {
    if (d != 1 && p0 != p1) {
        cache_->break_with("seq_div is not available for a context with a method: positions are the method's business");
    }
}

llama_pos lctx_context_memory::seq_pos_min(llama_seq_id seq_id) const {
    if (seq_pos_max(seq_id) < 0) {
        return -1;
    }
    return foreign_ ? std::max(0, foreign_->memory().seq_pos_min(seq_id)) : 0;
}

llama_pos lctx_context_memory::seq_pos_max(llama_seq_id seq_id) const {
    return seq_id >= 0 && seq_id < cache_->sequences().size() ? cache_->sequences().n_pos(seq_id) - 1 : -1;
}

// ---- states ----

void lctx_context_memory::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    if (flags != 0 && !(foreign_ && flags == LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        throw lctx_refusal("partial and on-device states are not available for this context with a method");
    }
    if (flags == 0) {
        cache_->state_write(io, seq_id);
    }
    if (foreign_) {
        foreign_->memory().state_write(io, seq_id, flags);
    }
    if (foreign_ && flags == 0) {
        const int32_t n_seq = cache_->sequences().size();
        for (int32_t seq = std::max(seq_id, 0); seq < (seq_id < 0 ? n_seq : seq_id + 1); seq++) {
            write_checkpoints(io, seq);
        }
    }
}

void lctx_context_memory::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (flags != 0 && !(foreign_ && flags == LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        throw lctx_refusal("partial and on-device states are not available for this context with a method");
    }
    if (flags == 0) {
        cache_->state_read(io, seq_id);
    }
    if (foreign_) {
        read_foreign(io, seq_id, flags);
    }
    if (foreign_ && flags == 0) {
        const int32_t n_seq = cache_->sequences().size();
        for (int32_t seq = std::max(seq_id, 0); seq < (seq_id < 0 ? n_seq : seq_id + 1); seq++) {
            read_checkpoints(io, seq);
        }
    }
}

std::vector<int32_t> lctx_context_memory::saved_checkpoints(int32_t seq) const {
    std::vector<int32_t> found;
    for (auto it = checkpoints_[seq].rbegin(); it != checkpoints_[seq].rend() && found.size() < MOST_SAVED; ++it) {
        if (cache_->restorable(seq, it->pos) == it->pos) {
            found.insert(found.begin(), it->pos);
        }
    }
    return found;
}

void lctx_context_memory::write_checkpoints(llama_io_write_i & io, int32_t seq) const {
    const std::vector<int32_t> positions = saved_checkpoints(seq);
    const auto n = (int32_t)positions.size();
    io.write(&n, sizeof(n));
    for (int32_t pos : positions) {
        const std::vector<uint8_t> & bytes = *find_checkpoint(seq, pos)->bytes;
        io.write(&pos, sizeof(pos));
        io.write(bytes.data(), bytes.size());
    }
}

// The checkpoints of a sequence that was just restored; without all of them it is empty.
void lctx_context_memory::read_checkpoints(llama_io_read_i & io, int32_t seq) {
    const int32_t n_pos = cache_->sequences().n_pos(seq);
    try {
        int32_t n;
        io.read(&n, sizeof(n));
        lctx_require_state(n >= 0 && n <= (int32_t)MOST_SAVED, "it has " + std::to_string(n) + " checkpoints");
        for (int32_t i = 0, before = 0; i < n; i++) {
            int32_t pos;
            io.read(&pos, sizeof(pos));
            lctx_require_state(pos > before && pos <= n_pos, "its checkpoints contradict its length");
            checkpoints_[seq].push_back(
                {pos, std::make_shared<const std::vector<uint8_t>>(foreign_->read_saved(io, seq, pos))});
            before = pos;
        }
    } catch (...) {
        empty(seq);
        throw;
    }
}

// Of a sequence, or all, at the positions where the cache is; empty when that fails.
void lctx_context_memory::read_foreign(llama_io_read_i & io, int32_t seq_id, llama_state_seq_flags flags) {
    const int32_t first = std::max(seq_id, 0), end = seq_id < 0 ? cache_->sequences().size() : seq_id + 1;
    for (int32_t seq = first; flags == 0 && seq < end; seq++) {
        checkpoints_[seq].clear();
        foreign_->remove(seq, 0);  // of an empty state llama.cpp reads nothing, and leaves what was there
    }
    try {
        foreign_->read(io, seq_id, flags, flags == 0 ? cache_->sequences().lengths() : std::vector<int32_t>());
    } catch (...) {
        for (int32_t seq = first; seq < end; seq++) {
            empty(seq);
        }
        throw;
    }
}

// Append what `read` reads to a sequence, as a whole or not at all.
void lctx_context_memory::append(int32_t seq, const std::function<void()> & read) {
    const int32_t n_pos = cache_->sequences().n_pos(seq);
    try {
        read();
    } catch (...) {
        cache_->truncate(seq, n_pos);
        throw;
    }
}

void lctx_context_memory::slice_read(lctx_state_reader & io, int32_t seq) {
    append(seq, [&] { cache_->slice_read(io, seq); });
}

void lctx_context_memory::slice_insert(lctx_state_reader & io, int32_t seq, int32_t skip, int32_t n) {
    if (foreign_) {
        throw lctx_refusal(
            "windows and recurrent states of a text cannot be placed elsewhere: this model reads it in its place");
    }
    append(seq, [&] { cache_->slice_insert(io, seq, skip, n); });
}

bool lctx_context_memory::drop(int32_t seq, int32_t first, int32_t end) {
    return foreign_ ? cache_->refuse(
                          "rows cannot leave the middle of a sequence whose windows or recurrent states have read them")
                    : cache_->drop(seq, first, end);
}

void lctx_context_memory::require_foreign() const {
    if (!foreign_) {
        throw lctx_refusal("this context has neither windows nor recurrent states");
    }
}

void lctx_context_memory::write_foreign(llama_io_write_i & io, int32_t seq) const {
    require_foreign();
    foreign_->memory().state_write(io, seq, 0);
}

void lctx_context_memory::read_foreign(llama_io_read_i & io, int32_t seq) {
    require_foreign();
    read_foreign(io, seq, 0);
}

// ---- sizes ----

std::map<ggml_backend_buffer_type_t, size_t> lctx_context_memory::memory_breakdown() const {
    auto bytes = cache_->placement().memory_breakdown();
    if (foreign_) {
        for (const auto & [buft, n] : foreign_->memory().memory_breakdown()) {
            bytes[buft] += n;
        }
    }
    return bytes;
}

void lctx_context_memory::each_size(const std::function<void(ggml_backend_dev_t, const lctx_sizes &)> & f) const {
    cache_->blocks().each_size(f);
    if (!foreign_) {
        return;
    }
    for (const auto & [buft, n] : foreign_->memory().memory_breakdown()) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
        lctx_sizes sizes = {};
        sizes.foreign = n;
        f(dev && !ggml_backend_buft_is_host(buft) ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU),
          sizes);
    }
    lctx_sizes checkpoints = {};
    checkpoints.foreign = n_checkpoint_ * foreign_bytes();
    f(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), checkpoints);
}

uint64_t lctx_context_memory::foreign_bytes() const {
    uint64_t n = 0;
    if (foreign_) {
        for (const auto & [buft, bytes] : foreign_->memory().memory_breakdown()) {
            n += bytes;
        }
    }
    return n;
}

uint64_t lctx_context_memory::checkpoint_bytes() const {
    uint64_t n = 0;
    for (const auto & all : checkpoints_) {
        for (const saved & s : all) {
            n += s.bytes->size();
        }
    }
    return n;
}
