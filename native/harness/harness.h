// Runs of single ops, for tests and bench: in a library that was built with LCTX_HARNESS=ON only.
//
// The block between the two markers is a cffi cdef, read by bench/op_harness.py. Each function returns 0 (LCTX_OK) on
// success, else LCTX_INVALID with the reason in err.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// [cdef begin]

// Store n_rows keys and values in shuffled pages, then attend with n_tokens queries of n_seg segments each. A segment
// of the near ring may read the last near_rows rows only.
typedef struct lctx_op_args {
    int32_t head_dim_k;
    int32_t head_dim_v;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t n_rows;
    int32_t n_tokens;
    int32_t n_seg;      // segments per query
    int32_t near_mask;  // bit s: segment s reads the near ring
    int32_t near_rows;  // rows of the near ring (multiple of 64), 0: none
    int32_t type_k;
    int32_t type_v;
    int32_t n_threads;
    int32_t page_seed;  // order of the pages in the pool, 0: that of a prompt
    int32_t n_repeat;   // attend this many times, for timing
    float scale;
    float softcap;      // 0: none
    int32_t rope_mode;  // 0 NORM, 2 NEOX
    int32_t rope_dims;
    int32_t rope_n_ctx_orig;
    float rope_freq_base;
    float rope_freq_scale;
    float rope_ext_factor;
    float rope_attn_factor;
    float rope_beta_fast;
    float rope_beta_slow;
    const float * freq_factors;  // [rope_dims/2] or NULL
    const float * k;             // [n_rows][n_head_kv][head_dim_k], not rotated
    const float * v;             // [n_rows][n_head_kv][head_dim_v]
    const int32_t * k_pos;       // [n_rows] storage position
    const int32_t * k_near_pos;  // [n_rows] position in the near ring, or NULL
    const float * q;             // [n_tokens][n_head][head_dim_k], not rotated
    const int32_t * seg_rows;    // [n_tokens][n_seg][2]: rows [row0, row1)
    const int32_t * seg_pos;     // [n_tokens][n_seg]: the position a from which the query looks at the segment
    float * out;                 // [n_tokens][n_head][head_dim_v]
    float * lse;                 // [n_tokens][n_head] or NULL
    double store_us;             // result: time of the store node
    double attend_us;            // result: shortest time of one attend node
    int32_t cold;    // 1: before every attend node all threads read four times the last-level cache; on the CPU only
    double * times;  // result: [n_repeat] microseconds of every attend node, or NULL
    const float * center;  // [n_head_kv][head_dim_k], subtracted from rotated keys, or NULL
    const char * device;   // where the graph runs: name of a ggml device ("CUDA0"), NULL: the CPU
    int32_t n_layer;     // flash and step: a graph of this many equal layers is timed, divided by their number; 0: one
    int32_t hadamard_k;  // channels that are transformed together (ops/hadamard.h), 0: none, -1: as a context stores
                         // these types
    int32_t hadamard_v;
    int32_t fixed;           // lctx_attend_params::fixed
    uint64_t scratch_bytes;  // result of flash and step: memory of the device in addition to the tensors; 0 on the CPU
} lctx_op_args;

int32_t lctx_op_run(lctx_op_args * args, char * err, size_t err_size);

// Run the same with what llama.cpp has: its layout of the KV cache, ggml_rope_ext, ggml_flash_attn_ext with a mask;
// attend_us and times are those of ggml_flash_attn_ext. One segment per query, no near ring, no lse; page_seed is not
// read.
int32_t lctx_flash_run(lctx_op_args * args, char * err, size_t err_size);

// One layer of any method: n_rows keys, values and queries of one sequence pass in ubatches of n_ubatch, cut at
// borders, through store, summarize, select, attend, vote and evict. op gives shapes, types, RoPE, scale, k, v, q and
// out; there n_tokens = n_rows, and its segments, near ring and positions are not read. Every query is causal. chunks:
// those that query and head read, ascending, then -1.
typedef struct lctx_layer_run_args {
    lctx_op_args * op;
    const char * method;  // "longheads,chunk_size=16,...", "corm,window=8,...", ...
    int32_t n_ctx_train;
    int32_t n_ubatch;
    int32_t
        n_summary;  // result: heads with a summary of their own: n_head or n_head_kv; 0 without chunks, as the next two
    int32_t summary_dim;  // result: head_dim_k times 1, 2 or 3, see lctx_summarize
    int32_t n_read;       // result: chunks that a query reads at most
    int32_t n_read_max;   // room in chunks
    float * summaries;  // [n_summary][n_rows/chunk_size][summary_dim], room for n_head x chunks x 3*head_dim_k; or NULL
    int32_t * chunks;   // [n_rows][n_head][n_read_max] or NULL
    int32_t
        n_text;  // > 0: rows from here on are a replay, after which the rule compresses the text before them; else 0
    double fraction;  // of its rows, that stay
    int32_t * held;   // [n_head_kv][n_rows]: 1 when the head holds the row after the last eviction that is due; or NULL
    int32_t * scores;  // [n_head_kv][n_rows]: scores of the rows that are held; or NULL
} lctx_layer_run_args;

int32_t lctx_layer_run(lctx_layer_run_args * args, char * err, size_t err_size);

enum lctx_step_op {
    LCTX_STEP_STORE,
    LCTX_STEP_SUMMARIZE,
    LCTX_STEP_SELECT,
    LCTX_STEP_ATTEND,
    LCTX_STEP_VOTE,
    LCTX_STEP_EVICT,
    LCTX_N_STEP_OP,
};

// The last n_tokens rows of a layer of any method, as one ubatch with its own queries; the rows before are stored and
// summarized, but nothing attends to them. op gives shapes, types, RoPE, scale, k, v, q [n_tokens], out, n_repeat and
// cold. Every sub-op runs n_repeat times, each time from the same state.
typedef struct lctx_step_run_args {
    lctx_op_args * op;
    const char * method;
    int32_t n_ctx_train;
    const float * fill_q;  // [n_rows - n_tokens][n_head][head_dim_k], read with representation=attention only
    double held_fraction;  // of the rows before, how many a head still holds where it evicts by votes alone, without a
                           // budget
    double open_fraction;  // of these, how many have no vote yet when the step begins
    int32_t n_held;        // result: rows that KV head 0 holds when the step begins
    double * times;  // result: [LCTX_N_STEP_OP][n_repeat] microseconds; 0 for what the method or the step does not do
    double attend_bytes;  // result: bytes that *attend* must read, everything once
    double attend_flops;  // result: additions and multiplications of its products
} lctx_step_run_args;

int32_t lctx_step_run(lctx_step_run_args * args, char * err, size_t err_size);

// A product of a quantized weight with columns, as a model's graph asks the CPU backend for it. With experts a column
// is a token's, and meets the rows of the n_used experts that ids names.
typedef struct lctx_multiply_args {
    int32_t type;    // ggml_type of the weight
    int32_t k_dim;   // multiple of the type's block
    int32_t n_rows;  // of the weight, or of each expert
    int32_t n_columns;
    int32_t n_expert;  // 0: one weight, and no experts
    int32_t n_used;
    int32_t n_own;  // columns of a token: 1 for all its experts, or n_used
    int32_t n_threads;
    int32_t n_repeat;     // multiply this many times, for timing
    const void * weight;  // [n_expert][n_rows] rows of k_dim values, as a file holds them
    const float * x;      // [n_columns][n_own][k_dim]
    const int32_t * ids;  // [n_columns][n_used]
    float * out;          // [n_columns][n_used][n_rows]
    int32_t fixed;        // 1: its sums have one order (native/ops/fixed.h)
    int32_t is_ours;      // result: 1 when native/weights/multiply.cpp computed it, 0: ggml
    double us;            // result: shortest time in microseconds
} lctx_multiply_args;

int32_t lctx_multiply_run(lctx_multiply_args * args, char * err, size_t err_size);

// An op on rows of floats (native/weights/rowwise.cpp): with b [n_rows] each row of a times its number; with b
// [n_rows][n] the gate of gpt-oss.
typedef struct lctx_rowwise_args {
    int32_t n;
    int32_t n_rows;
    int32_t is_gate;
    int32_t n_threads;
    float alpha;  // of the gate
    float limit;
    const float * a;  // [n_rows][n]
    const float * b;
    float * out;      // [n_rows][n]
    int32_t is_ours;  // result: 1 when native/weights/rowwise.cpp computed it, 0: ggml
} lctx_rowwise_args;

int32_t lctx_rowwise_run(lctx_rowwise_args * args, char * err, size_t err_size);

// Counts what *attend* and *vote* looked at in their lists since the last call, by all threads (native/cpu/lookups.h).
typedef struct lctx_lookups_args {
    int64_t segments;  // result: of lists that were inverted
    int64_t items;     // result: that splits of tiles went through
} lctx_lookups_args;

int32_t lctx_lookups_run(lctx_lookups_args * args, char * err, size_t err_size);

// Asks whether the sequences and pages of a context with a method contradict each other (native/memory/sequences.h has
// what holds); without a method nothing is checked.
typedef struct lctx_check_args {
    const void * context;  // that lctx_context_llama returns
} lctx_check_args;

int32_t lctx_check_run(lctx_check_args * args, char * err, size_t err_size);

// Numbers that ggml's constructors get for the nodes of which native/ reads them (native/ops/params.h). A run replaces
// each by what is read. op gives RoPE, whose mode is one with sections, and nothing else.
typedef struct lctx_params_args {
    lctx_op_args * op;
    int32_t rope_sections[4];
    int32_t rope_offset;
    float scale_factor;
    float scale_bias;
    float norm_eps;
    int32_t concat_dim;
    float gate_alpha;
    float gate_limit;
    int32_t has_hint;
    int32_t is_fixed[2];  // of a product and one with experts, after ggml has set all that it can: whether native/ has
                          // marked them
} lctx_params_args;

int32_t lctx_params_run(lctx_params_args * args, char * err, size_t err_size);

// Tells what the machine can do at most, measured: each the best of a few runs with n_threads.
typedef struct lctx_roofline_args {
    int32_t n_threads;
    const char * device;    // name of a ggml device: only its copy_bandwidth is measured; NULL: all, of the CPU
    uint64_t cache_bytes;   // result: the last-level cache
    double read_bandwidth;  // result: bytes per second, reading eight times the last-level cache
    double gemm_f32;        // result: operations per second of a matrix product that stays in the first-level cache
    double gemm_bf16;       // result: the same with bf16 factors and float sums; 0: not compiled for such a CPU
    double copy_bandwidth;  // result: bytes read and written per second, copying 256 MiB within the device
} lctx_roofline_args;

int32_t lctx_roofline_run(lctx_roofline_args * args, char * err, size_t err_size);

// Split a text of code points by an expression as llama.cpp does for BPE, and by std::regex, to compare them.
typedef struct lctx_split_args {
    const uint32_t * expression;
    int32_t n_expression;
    const uint32_t * text;
    int32_t n_text;
    int32_t is_wide;       // 0: code points are bytes, as where classes of characters stand for characters
    int32_t by_std_regex;  // 1: by std::regex
    int32_t * lengths;     // result: [2 * n_text + 2] lengths of matches and of what is between them
    int32_t n_length;      // result
} lctx_split_args;

int32_t lctx_split_run(lctx_split_args * args, char * err, size_t err_size);

// [cdef end]

#ifdef __cplusplus
}
#endif
