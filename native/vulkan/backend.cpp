// The kernels as an op of ggml's Vulkan backend: the one file that includes its headers. Pointers of the arguments are
// addresses of the device (VK_KHR_buffer_device_address) here, so that ../ops/nodes.h serves all backends, and no
// descriptor limits a pool.
#include "ggml-vulkan-common.h"

#include "../base/kernel-name.h"
#include "../hooks.h"
#include "../ops/cache.h"
#include "../ops/half.h"
#include "../ops/nodes.h"
#include "ledger.h"

#include "args.h"
#include "lctx-shaders.h"

namespace {

// Repeat what args.h says, as GLSL lays it out: a shader does not compile when its last member lies elsewhere.
constexpr size_t MOST_PUSHED = 128;  // that every device takes
#define LAST(offset, type, name) \
    type name;                   \
    static constexpr size_t OFFSET = offset, SIZE = (offset) + sizeof(type);
#define PUSHED(name, MEMBERS, last) \
    struct name {                   \
        MEMBERS(LAST)               \
    };                              \
    static_assert(offsetof(name, last) == name::OFFSET && name::SIZE <= MOST_PUSHED)
PUSHED(angles_push, LCTX_VK_ANGLES, magnitude);
PUSHED(store_push, LCTX_VK_STORE, n_tokens);
PUSHED(attend_push, LCTX_VK_ATTEND, softcap);
PUSHED(merge_push, LCTX_VK_MERGE, lse);
PUSHED(index_push, LCTX_VK_INDEX, n_rows);
PUSHED(score_push, LCTX_VK_SCORE, scale);
PUSHED(choose_push, LCTX_VK_CHOOSE, n_slab);
#undef PUSHED
#undef LAST

constexpr int MOST_DIM = 576, OCTET = 8;
constexpr int ATTEND_THREADS = 128;                    // as attend.comp has them
constexpr int SCORE_THREADS = 128, SCORE_CHUNKS = 32;  // as score.comp has them
constexpr int MOST_COMPARED = 4;                       // queries of a tile at a time
constexpr int MOST_COLUMNS = 16;                       // of a tile, 8 where values are wide: sums are in registers
constexpr uint32_t MOST_GROUPS = 1 << 15;              // of a dispatch whose shader loops over the rest
constexpr int64_t ENOUGH = 128;                        // workgroups: where there are few, work is split among as many
// Bytes for the scores of *select*, of as many tokens at a time; in test builds few, so that a batch takes several
// turns.
#ifdef LCTX_HARNESS
constexpr int64_t MOST_SCORES = 64 << 10;
#else
constexpr int64_t MOST_SCORES = 64 << 20;
#endif

uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

uint64_t address_of(const void * at) {
    return (uint64_t)(uintptr_t)at;
}

int power_of_two(int n) {
    int power = 1;
    while (power < n) {
        power *= 2;
    }
    return power;
}

// ---- nodes with addresses ----

vk_buffer & buffer_of(const ggml_tensor * t) {
    return ((ggml_backend_vk_buffer_context *)(t->view_src ? t->view_src : t)->buffer->context)->dev_buffer;
}

char * device_address(const ggml_tensor * t) {
    return (char *)(uintptr_t)(buffer_of(t)->bda_addr + (uint64_t)((const char *)t->data - (const char *)vk_ptr_base));
}

// A node whose tensors have their addresses on the device.
struct addressed {
    ggml_tensor node, src[GGML_MAX_SRC];

    explicit addressed(const ggml_tensor * dst) : node(*dst) {
        node.data = device_address(dst);
        for (int i = 0; i < GGML_MAX_SRC; i++) {
            if (dst->src[i]) {
                src[i] = *dst->src[i];
                src[i].data = device_address(dst->src[i]);
                node.src[i] = &src[i];
            }
        }
    }
    lctx_vk_range range(int i) const {
        return node.src[i] ? lctx_vk_range{address_of(node.src[i]->data), ggml_nbytes(node.src[i])}
                           : lctx_vk_range{0, 0};
    }
    lctx_vk_range result() const { return {address_of(node.data), ggml_nbytes(&node)}; }
};

// ---- pipelines ----

using constants = std::vector<uint32_t>;

template <typename... T> constants constants_of(T... values) {
    return {(uint32_t)values...};
}

vk_pipeline create_pipeline(const vk_device & device, const uint32_t * code, size_t size, uint32_t n_push,
                            const constants & values) {
    const vk::PushConstantRange range(vk::ShaderStageFlagBits::eCompute, 0, n_push);
    std::vector<vk::SpecializationMapEntry> entries;
    for (uint32_t i = 0; i < values.size(); i++) {
        entries.push_back({i, i * (uint32_t)sizeof(uint32_t), sizeof(uint32_t)});
    }
    const vk::SpecializationInfo info((uint32_t)entries.size(), entries.data(), values.size() * sizeof(uint32_t),
                                      values.data());
    auto p = std::make_shared<vk_pipeline_struct>();
    p->layout = device->device.createPipelineLayout({{}, 0, nullptr, 1, &range});
    p->shader_module = device->device.createShaderModule({{}, size, code});
    const vk::PipelineShaderStageCreateInfo stage({}, vk::ShaderStageFlagBits::eCompute, p->shader_module, "main",
                                                  &info);
    p->pipeline = device->device.createComputePipeline(VK_NULL_HANDLE, {{}, stage, p->layout}).value;
    const std::lock_guard<std::mutex> guard(device->compile_mutex);
    device->all_pipelines.push_back(p);  // which the device destroys
    return p;
}

vk_pipeline pipeline_of(const vk_device & device, const uint32_t * code, size_t size, uint32_t n_push,
                        const constants & values) {
    static std::mutex mutex;
    static auto & all = *new std::map<std::tuple<vk_device_struct *, const uint32_t *, constants>, vk_pipeline>;
    const std::lock_guard<std::mutex> guard(mutex);
    vk_pipeline & p = all[{device.get(), code, values}];
    if (!p) {
        p = create_pipeline(device, code, size, n_push, values);
    }
    return p;
}

// ---- commands ----

using ranges = std::initializer_list<lctx_vk_range>;

struct recorder {
    ggml_backend_vk_context * ctx;
    vk_context sub;

    // ggml sees what a node reads, and its result: not that *store* writes into pools, nor what our dispatches leave
    // for each other.
    void barrier(const char * name, ranges reads, ranges writes) {
        lctx_vk_ledger & ledger = lctx_vk_ledger::of(ctx);
        if (ledger.barrier(name)) {
            ggml_vk_sync_buffers(ctx, sub);
        }
        ledger.dispatch(name, reads, writes);
    }
    template <size_t N, typename T> void dispatch(const uint32_t (&code)[N], const constants & values, const T & push,
                                                  uint32_t x, uint32_t y = 1, uint32_t z = 1) {
        const vk_pipeline p = pipeline_of(ctx->device, code, sizeof(code), T::SIZE, values);
        vk::CommandBuffer commands = sub->s->buffer->buf;
        commands.pushConstants(p->layout, vk::ShaderStageFlagBits::eCompute, 0, T::SIZE, &push);
        commands.bindPipeline(vk::PipelineBindPoint::eCompute, p->pipeline);
        commands.dispatch(x, y, z);
    }
    // Memory for what the dispatches of a node leave for each other, which the next node may use as well.
    uint64_t scratch(size_t size) {
        if (ctx->prealloc_size_split_k < size) {
            ctx->prealloc_size_split_k = size;
            ggml_vk_preallocate_buffers(ctx, sub);
        }
        return ctx->prealloc_split_k->bda_addr;
    }
};

uint32_t groups_for(int64_t n, int64_t of_group = 1) {
    return (uint32_t)std::min<int64_t>(lctx_div_up(n, of_group), MOST_GROUPS);
}

void angles(recorder & r, const addressed & node) {
    const lctx_angles_args a = lctx_angles_args_of(const_cast<ggml_tensor *>(&node.node));
    const lctx_rope & rope = a.rope;
    angles_push push = {address_of(a.pos), address_of(a.freq_factors), address_of(a.dst), (int)a.n, rope.n_dims / 2};
    float corr[2];
    ggml_rope_yarn_corr_dims(rope.n_dims, rope.n_ctx_orig, rope.freq_base, rope.beta_fast, rope.beta_slow, corr);
    push.freq_scale = rope.freq_scale;
    push.ext_factor = rope.ext_factor;
    push.corr_low = corr[0];
    push.corr_high = corr[1];
    push.theta_scale = powf(rope.freq_base, -2.0f / (float)rope.n_dims);
    push.magnitude = rope.attn_factor * (rope.ext_factor != 0.0f ? 1.0f + 0.1f * logf(1.0f / rope.freq_scale) : 1.0f);
    // no barrier, and nothing for the ledger: ggml sees all that is read and written
    r.dispatch(ANGLES, {}, push, groups_for(a.n * push.n_pair, 64));
}

// Push where the rows of a cache are, for the shaders that write or read them.
template <typename T> void push_cache(T & push, const lctx_cache_args & c) {
    push.k_pool = address_of(c.k_pool.data), push.v_pool = address_of(c.v_pool.data);
    push.k_row = (int)c.k_pool.row_size, push.v_row = (int)c.v_pool.row_size;
    push.pages = address_of(c.table.pages), push.near = address_of(c.near.data);
    push.page_head_stride = (int)c.table.head_stride, push.page_seq_stride = (int)c.table.seq_stride;
    push.near_head_stride = (int)c.near.head_stride, push.near_seq_stride = (int)c.near.seq_stride;
}

void store(recorder & r, const addressed & node) {
    const lctx_store_args a = lctx_store_args_of(&node.node);
    const lctx_cache_args & c = a.cache;
    store_push push = {};
    push.k = address_of(a.k), push.v = address_of(a.v);
    push_cache(push, c);
    push.rows = address_of(a.rows), push.angles = address_of(a.angles), push.center = address_of(a.center);
    push.k_head_stride = (int)a.k_head_stride, push.k_token_stride = (int)a.k_token_stride;
    push.v_head_stride = (int)a.v_head_stride, push.v_token_stride = (int)a.v_token_stride;
    push.n_tokens = a.n_tokens;
    const constants values = constants_of(
        c.k_pool.type, c.v_pool.type, a.head_dim_k, a.head_dim_v, a.n_head_kv, a.n_dims, a.params.rope_mode,
        a.params.hadamard.k, a.params.hadamard.v, std::max<int64_t>(1, c.near.rows),
        bits_of(lctx_most_stored(c.k_pool.type, false)),
        bits_of(lctx_most_stored(c.v_pool.type, !lctx_values_in_keys(c))), std::max(a.head_dim_k, a.head_dim_v));
    r.barrier("store", {node.range(0), node.range(1), node.range(4), node.range(5), node.range(6), node.range(9)},
              {node.range(2), node.range(3), node.range(7)});
    r.dispatch(STORE, values, push, groups_for((int64_t)a.n_tokens * a.n_head_kv), c.near.data ? 3 : 2);
}

// Shared memory of attend.comp.
size_t tile_bytes(int columns, int head_dim_k) {
    return sizeof(float) * ((size_t)columns * (head_dim_k + 2 * LCTX_PAGE_ROWS + 6) + ATTEND_THREADS + LCTX_PAGE_ROWS);
}

// Queries and heads of a workgroup, for n of them: no more than there are, and than the device has shared memory for.
int columns_of(const lctx_attend_args & a, int64_t n, size_t most_shared) {
    int columns = power_of_two((int)std::min<int64_t>(n, a.head_dim_v > 256 ? MOST_COLUMNS / 2 : MOST_COLUMNS));
    while (columns > 1 && tile_bytes(columns, a.head_dim_k) > most_shared) {
        columns /= 2;
    }
    return columns;
}

// A dispatch of attend.comp: for tokens of tiles that share their chunks, or for those outside of them.
struct attend_dispatch {
    bool shared;
    int columns;
    int64_t n_group;  // workgroups for a KV head

    attend_dispatch(const lctx_attend_args & a, bool shared, size_t most_shared) : shared(shared) {
        const int64_t group = a.n_head / a.n_head_kv,
                      n = group * (shared ? a.params.tiles.n_token() : a.choices().n_alone());
        const int together = a.n_head / a.n_choice;  // heads that read the same
        const bool apart = !shared && a.params.chunk_size > 0;
        columns = columns_of(a, apart ? std::min<int64_t>(n, together & -together) : n, most_shared);
        n_group = lctx_div_up(n, columns);
    }
    void record(recorder & r, const lctx_attend_args & a, const attend_push & push) const {
        const lctx_cache_args & c = a.cache;
        const lctx_tiles & t = a.params.tiles;
        const int lanes = std::max(ATTEND_THREADS / columns, std::min(power_of_two(a.head_dim_v), ATTEND_THREADS));
        const constants values = constants_of(
            c.k_pool.type, c.v_pool.type, a.head_dim_k, a.head_dim_v, a.n_head_kv, a.n_dims, a.params.rope_mode,
            a.params.hadamard.k, std::max<int64_t>(1, c.near.rows), a.n_head / a.n_head_kv, columns, lanes, a.n_choice,
            shared, std::max(1, t.size), std::max(1, a.params.chunk_size), a.params.n_run, t.n_given, t.n_shared);
        if (n_group > 0) {
            r.dispatch(ATTEND, values, push, (uint32_t)n_group, (uint32_t)a.n_head_kv, (uint32_t)push.n_split);
        }
    }
};

void attend(recorder & r, const addressed & node) {
    const lctx_attend_args a = lctx_attend_args_of(&node.node);
    const lctx_cache_args & c = a.cache;
    const size_t most_shared = r.ctx->device->properties.limits.maxComputeSharedMemorySize;
    const attend_dispatch alone(a, false, most_shared), tiles(a, true, most_shared);
    const int64_t n_page = std::max<int64_t>(1, (int64_t)c.table.head_stride),
                  n_group = (alone.n_group + tiles.n_group) * a.n_head_kv;
    attend_push push = {};
    push_cache(push, c);
    push.q = address_of(a.q), push.segs = address_of(a.segs), push.angles = address_of(a.angles),
    push.dst = address_of(a.dst);
    push.q_head_stride = (int)a.q_head_stride, push.q_token_stride = (int)a.q_token_stride;
    push.n_tokens = a.n_tokens, push.n_tile = a.params.tiles.n_tile, push.n_seg = a.n_seg;
    push.near_mask = (int)a.params.near_mask, push.lse = a.lse != nullptr;
    push.n_split = (int)std::max<int64_t>(1, std::min(n_page, ENOUGH / n_group));
    push.softcap = a.params.softcap;
    push.scale = a.params.softcap != 0.0f ? a.params.scale / a.params.softcap : a.params.scale;
    const int64_t n_row = (int64_t)a.n_tokens * a.n_head;
    merge_push merge = {0, push.dst, (int)n_row, 0, push.lse};
    lctx_vk_range written = node.result();
    if (push.n_split > 1) {
        written.size = (size_t)n_row * push.n_split * (a.head_dim_v + 2) * sizeof(float);
        written.begin = merge.states = push.dst = r.scratch(written.size);
        merge.n_split = push.n_split;
    }
    r.barrier("attend",
              {node.range(0), node.range(1), node.range(2), node.range(3), node.range(4), node.range(5), node.range(6)},
              {written});
    alone.record(r, a, push);
    tiles.record(r, a, push);  // rows of other tokens: no barrier
    if (push.n_split > 1 || a.params.hadamard.v != 0) {
        r.barrier("merge", {written}, {node.result()});
        r.dispatch(MERGE, {(uint32_t)a.head_dim_v, a.params.hadamard.v}, merge, groups_for(n_row));
        r.ctx->prealloc_split_k_need_sync = true;
    }
}

// ---- chunks ----

void index(recorder & r, const addressed & node) {
    const lctx_index_args a = lctx_index_args_of(&node.node);
    const lctx_cache_args & c = a.cache;
    index_push push = {address_of(c.k_pool.data), address_of(c.index.data), address_of(c.table.pages),
                       address_of(a.rows)};
    push.k_row = (int)c.k_pool.row_size, push.index_row = (int)c.index.row_size, push.n_rows = a.n_rows;
    push.page_head_stride = (int)c.table.head_stride, push.page_seq_stride = (int)c.table.seq_stride;
    const lctx_index_shape & shape = a.index;
    const constants values = constants_of(c.k_pool.type, shape.head_dim, a.n_head_kv, a.hadamard_k, shape.hadamard(),
                                          shape.bits, shape.n_code());
    r.barrier("index", {node.range(0), node.range(1), node.range(2)}, {node.range(4)});
    r.dispatch(INDEX, values, push, groups_for((int64_t)a.n_rows * a.n_head_kv));
}

// Numbers of a head among the scores of *select*: of chunks, then what it reads anyway.
int32_t n_score(const lctx_select_args & a) {
    return a.n_chunk_max + 1;
}

// Bytes for the scores of as many tokens or tiles, of n, as are taken at a time.
size_t score_bytes(const lctx_select_args & a, int64_t n) {
    const auto of_one = (int64_t)(a.n_head * n_score(a) * sizeof(float));
    return (size_t)(of_one * std::clamp<int64_t>(MOST_SCORES / of_one, 1, std::max<int64_t>(1, n)));
}

// Queries of a tile that are compared at a time, as far as there is shared memory for score.comp.
int compared_of(const lctx_select_args & a, size_t most_shared) {
    const int n = a.chunks.tile / a.chunks.step;
    const auto bytes = [&](int columns) {
        return sizeof(float) * ((size_t)columns * (2 * a.head_dim + 8) + 2 * SCORE_THREADS);
    };
    int columns = std::min(MOST_COMPARED, n & -n);
    while (columns > 1 && bytes(columns) > most_shared) {
        columns /= 2;
    }
    return columns;
}

constants score_constants(const lctx_select_args & a, bool shared, size_t most_shared) {
    const lctx_chunks & c = a.chunks;
    return constants_of(a.head_dim, a.n_head, a.n_head / a.n_list, a.n_dims, a.rope_mode, a.index.hadamard(),
                        c.chunk_size, c.n_run, c.n_range, a.index.bits, a.index.n_code(), c.tile, shared,
                        shared ? c.step : 1, shared ? compared_of(a, most_shared) : 1, shared || c.by_group,
                        a.near_mask);
}

constants choose_constants(const lctx_select_args & a, bool shared) {
    const lctx_chunks & c = a.chunks;
    return constants_of(a.n_head, shared ? a.n_list : a.n_choice, c.chunk_size, c.n_run, c.n_range,
                        shared ? c.n_shared : c.n_free, c.tile, shared, !shared && c.by_group, c.cutoff);
}

// Scores of as many tokens outside of tiles as there is room for, then their choices; or of tiles that share their
// chunks.
void choose_for(recorder & r, const addressed & node, const lctx_select_args & a, bool shared,
                const lctx_vk_range & scores) {
    const int32_t n = shared ? a.n_tile : a.choices().n_alone();
    const auto most = (int32_t)(score_bytes(a, n) / (a.n_head * n_score(a) * sizeof(float)));
    const uint64_t tiles = address_of(a.tiles);
    score_push score = {address_of(a.q), address_of(a.cache.index.data), address_of(a.cache.table.pages),
                        address_of(a.rows)};
    score.segs = address_of(a.segs), score.angles = address_of(a.angles), score.tiles = tiles,
    score.scores = scores.begin;
    score.q_head_stride = (int)a.q_head_stride, score.q_token_stride = (int)a.q_token_stride,
    score.index_row = (int)a.cache.index.row_size;
    score.page_head_stride = (int)a.cache.table.head_stride, score.page_seq_stride = (int)a.cache.table.seq_stride;
    score.n_score = n_score(a), score.n_tile = a.n_tile, score.scale = a.scale;
    choose_push choose = {score.rows, score.segs, tiles, scores.begin,
                          address_of(shared ? (const void *)a.choices().firsts() : a.dst)};
    choose.n_score = n_score(a), choose.n_tile = a.n_tile;
    const constants to_score = score_constants(a, shared, r.ctx->device->properties.limits.maxComputeSharedMemorySize);
    const constants to_choose = choose_constants(a, shared);
    const int64_t n_part = lctx_div_up(a.n_chunk_max + 1, SCORE_CHUNKS), n_choice = shared ? a.n_list : a.n_choice;
    for (score.first = choose.first = 0; score.first < n; score.first = choose.first += most) {
        score.n_slab = choose.n_slab = std::min(most, n - score.first);
        r.barrier(
            "score",
            {node.range(0), node.range(1), node.range(2), node.range(3), node.range(4), node.range(5), node.range(7)},
            {scores});
        r.dispatch(SCORE, to_score, score, groups_for(score.n_slab), (uint32_t)a.n_head,
                   (uint32_t)std::clamp<int64_t>(ENOUGH / ((int64_t)score.n_slab * a.n_head), 1, n_part));
        r.barrier("choose", {node.range(2), node.range(3), node.range(7)}, {scores, node.result()});
        r.dispatch(CHOOSE, to_choose, choose, groups_for(choose.n_slab * n_choice));
    }
}

// Choose chunks: what every head reads becomes a list of segments, which *attend* splits; that of a tile a list of
// chunks.
void select(recorder & r, const addressed & node) {
    const lctx_select_args a = lctx_select_args_of(&node.node);
    const size_t size = std::max(score_bytes(a, a.choices().n_alone()), score_bytes(a, a.n_tile));
    const lctx_vk_range scores = {r.scratch(size), size};
    choose_for(r, node, a, false, scores);
    choose_for(r, node, a, true, scores);
    r.ctx->prealloc_split_k_need_sync = true;
}

// ---- what is served ----

bool has_addresses(const vk_device & device) {
    return device->buffer_device_address && device->shader_int64;
}

bool fits(int64_t head_dim) {
    return head_dim % OCTET == 0 && head_dim <= MOST_DIM;
}

bool stores(const ggml_tensor * op) {
    const ggml_tensor *near = op->src[7], *held = op->src[8];
    return fits(op->src[0]->ne[0]) && fits(op->src[1]->ne[0]) && !held &&
           lctx_params_of<lctx_store_params>(op).staged_chunk == 0 && (!near || near->nb[3] <= INT32_MAX);
}

bool attends(const ggml_tensor * op) {
    const auto params = lctx_params_of<lctx_attend_params>(op);
    const ggml_tensor *near = op->src[6], *held = op->src[LCTX_ATTEND_HELD];
    const bool staged = op->src[LCTX_ATTEND_HELD + 1] && !params.writes;
    return fits(op->src[0]->ne[0]) && fits(op->src[2]->ne[0]) && !held && !staged && !params.fixed &&
           (!near || near->nb[3] <= INT32_MAX);
}

bool indexes(const ggml_tensor * op) {
    return fits(op->src[0]->ne[0]) && !op->src[3];
}

// By keys: summaries have no kernels.
bool selects(const ggml_tensor * op) {
    return fits(op->src[0]->ne[0]) && !op->src[6] && lctx_params_of<lctx_select_params>(op).chunks.by_keys();
}

}  // namespace

std::string lctx_vk_describe(ggml_backend_dev_t dev) {
    const vk_device device = ggml_vk_get_device(((const ggml_backend_vk_device_context *)dev->context)->device);
    vk::PhysicalDeviceDriverProperties driver;
    vk::PhysicalDeviceProperties2 properties;
    properties.pNext = &driver;
    device->physical_device.getProperties2(&properties);
    std::string text = std::string(ggml_backend_dev_description(dev)) + ", " + driver.driverName.data() + " " +
                       driver.driverInfo.data();
    text += ", subgroups of " + std::to_string(device->subgroup_size);
    text += ", buffers of at most " + std::to_string(device->max_memory_allocation_size >> 20) + " MiB";
    return has_addresses(device) ? text : text + "; without bufferDeviceAddress or shaderInt64, which methods need";
}

bool lctx_vk_supported(const vk_device & device, const ggml_tensor * op) {
    if (!has_addresses(device)) {
        return false;
    }
    switch ((lctx_op)op->op_params[0]) {
        case LCTX_OP_ANGLES: return true;
        case LCTX_OP_STORE:  return stores(op);
        case LCTX_OP_ATTEND: return attends(op);
        case LCTX_OP_INDEX:  return indexes(op);
        case LCTX_OP_SELECT: return selects(op);
        default:             return false;
    }
}

void lctx_vk_forward(ggml_backend_vk_context * ctx, const vk_context & sub, ggml_tensor * dst) {
    const addressed node(dst);
    recorder r = {ctx, sub};
    switch ((lctx_op)dst->op_params[0]) {
        case LCTX_OP_ANGLES: return angles(r, node);
        case LCTX_OP_STORE:  return store(r, node);
        case LCTX_OP_ATTEND: return attend(r, node);
        case LCTX_OP_INDEX:  return index(r, node);
        case LCTX_OP_SELECT: return select(r, node);
        default:             GGML_ABORT("LCTX sub-op %d is not served by Vulkan", dst->op_params[0]);
    }
}
