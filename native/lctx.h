// The C API of pylongctx.
//
// The blocks between the two markers, here, in base/counts.h and in lctx-sampling.h, are the cffi cdef, read verbatim
// by native/build_ffi.py: opaque structs, plain structs of fixed-size fields, enums with values, functions. No macros
// but numbers, no llama.h types.
//
// Handles: lctx_model_load and lctx_context_create return a handle even when they fail; then *_error() gives the reason
// and only *_error() and *_free() may be called. One call at a time per handle; different contexts may run in parallel.
// No function throws, and none aborts on bad arguments; pointers are valid for what they are said to hold. Questions
// change nothing.
#pragma once

#include "base/counts.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// [cdef begin]

enum { LCTX_ABI_VERSION = 23 };

typedef struct lctx_model lctx_model;
typedef struct lctx_context lctx_context;

// ---- library ----

// LCTX_ABI_VERSION of the library; Python refuses another one.
int32_t lctx_abi_version(void);

// One JSON object: version, upstream, series (hash of tarball and patches), compiler, build_type, backends (devices),
// kernels (by device), native, cuda (architectures that kernels were compiled for; null: none), emulates_cuda
// (LCTX_HARNESS), prompt_products (in which numbers the CPU multiplies K and V of prompts).
const char * lctx_build_info(void);

// Add the CUDA backend of a library of the package pylongctx-cuda, before anything else of this library but
// lctx_log_set_level is called. LCTX_INVALID, with the reason in err, when it cannot be loaded, belongs to another
// version, or a backend is there already.
int32_t lctx_cuda_load(const char * path, char * err, size_t err_size);

// The CPU features that the kernels were compiled for, as llama.cpp prints them.
const char * lctx_system_info(void);

// Set which log lines of llama.cpp reach stderr: 0 none, 1 errors, 2 warnings, 3 info, 4 debug. Process-wide.
void lctx_log_set_level(int32_t level);

// The ggml type with this name ("f16", "q8_0"), or -1.
int32_t lctx_type_from_name(const char * name);

// The name of a ggml type, or NULL.
const char * lctx_type_name(int32_t type);

// ---- devices ----

typedef struct lctx_device_info {
    const char * name;  // strings of the library, never freed
    const char * description;
    const char * type;  // "CPU", "GPU", "integrated GPU", "accelerator"
    uint64_t memory_free;
    uint64_t memory_total;  // 0: the device does not tell
} lctx_device_info;

// The devices of this machine that the build can use. LCTX_INVALID when there is none with this number.
int32_t lctx_device_count(void);
int32_t lctx_device_get(int32_t i, lctx_device_info * info);

// 1 when a device ("CPU", "CUDA0") can store K and V of a ggml type in heads of head_dim numbers, and attend to them;
// else 0, as for a device that is not there and a type that K and V cannot have.
int32_t lctx_device_attends(const char * device, int32_t type, int32_t head_dim);

// Lend devices of this machine ("CUDA0,CUDA1"; NULL or "": its GPUs, else the CPU) to others, one client at a time, on
// endpoint "address:port" (IPv4), until the process ends. No authentication, no encryption: for trusted networks only.
// Returns only when that cannot be: LCTX_INVALID, with the reason in err.
int32_t lctx_rpc_serve(const char * endpoint, const char * devices, int32_t n_threads, char * err, size_t err_size);

// ---- model ----

typedef struct lctx_model_params {
    int32_t n_gpu_layers;
    int32_t split_mode;
    int32_t main_gpu;
    int32_t vocab_only;
    int32_t use_mmap;
    int32_t use_mlock;
    const float * tensor_split;  // [n_tensor_split] fractions of the devices, in their order; NULL: by free memory
    int32_t n_tensor_split;
    const char * rpc_servers;  // "host:port,host:port" whose devices come before the GPUs of this machine, or NULL
    int32_t dry;               // 1: the weights get no memory; for lctx_estimate, contexts and adapters are refused
    int32_t deterministic;     // 1: weights stay as the file has them; for contexts that are
    int32_t mtp;               // 1: the block that drafts (MTP) is loaded too; for contexts with it
} lctx_model_params;

typedef struct lctx_model_info {
    int32_t n_vocab;
    int32_t n_ctx_train;  // sizes are 0 when only the vocabulary was loaded
    int32_t n_embd;
    int32_t n_layer;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t token_bos;
    int32_t token_eos;
    int32_t token_nl;
    int32_t token_sep;
    int32_t add_bos;
    int32_t add_eos;
    int32_t add_sep;  // 1: between two texts, as of a question and a document
    uint64_t size;
    uint64_t n_params;
} lctx_model_info;

// Fill *params with llama.cpp's defaults.
void lctx_model_params_default(lctx_model_params * params);

// Load a GGUF file. overrides: NULL, or JSON with "metadata" (values in the place of the file's, by key: bool, int,
// float, or a string of at most 127 bytes) and "tensors" (buffer types such as "CPU", by a regular expression that is
// searched in names of tensors; the first that is found counts). Never NULL; check lctx_model_error.
lctx_model * lctx_model_load(const char * path, const lctx_model_params * params, const char * overrides);

// NULL when the model is loaded, else why it is not.
const char * lctx_model_error(const lctx_model * model);

// Free the model; contexts made from it must be freed before. NULL is allowed.
void lctx_model_free(lctx_model * model);

void lctx_model_get_info(const lctx_model * model, lctx_model_info * info);

// The llama_model of the handle, for the functions of llama.h; it lives as long as the handle.
void * lctx_model_llama(const lctx_model * model);

// Metadata of the GGUF as strings. Each returns the length of the string (it may exceed size - 1: call again), or -1.
int32_t lctx_model_meta_count(const lctx_model * model);
int32_t lctx_model_meta_key(const lctx_model * model, int32_t i, char * buf, size_t size);
int32_t lctx_model_meta_val(const lctx_model * model, int32_t i, char * buf, size_t size);
int32_t lctx_model_desc(const lctx_model * model, char * buf, size_t size);

// ---- vocabulary ----

// Tokenize n_text bytes. Returns the number of tokens, or minus the number needed when n_max is too small; INT32_MIN
// when the vocabulary has none for them.
int32_t lctx_tokenize(const lctx_model * model, const char * text, int32_t n_text, int32_t * tokens, int32_t n_max,
                      int32_t add_special, int32_t parse_special);

// The bytes of one token, without a leading-space rule. Returns their number, or minus the number needed; INT32_MIN as
// above.
int32_t lctx_token_to_piece(const lctx_model * model, int32_t token, char * buf, int32_t size, int32_t special);

// 1 when the token ends a generation.
int32_t lctx_token_is_eog(const lctx_model * model, int32_t token);

// ---- context ----

// kv_offload: twice what a token reads
#define LCTX_OFFLOAD_AUTO 0xffffffffffffffff

typedef struct lctx_context_params {
    uint32_t n_seq_max;
    uint32_t
        n_ctx;  // of a sequence; 0: the trained context, times 4 if the method extends; at most the learned positions
    uint32_t n_batch;  // more than 2^22 is as much as that; with causal attention, more than n_ctx as n_ctx
    uint32_t n_ubatch;
    int32_t n_threads;
    int32_t n_threads_batch;
    int32_t type_k;
    int32_t type_v;
    int32_t rope_scaling_type;
    int32_t pooling_type;
    int32_t attention_type;
    float rope_freq_base;  // 0: from the model
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    int32_t embeddings;
    int32_t offload_kqv;
    int32_t op_offload;
    int32_t no_perf;
    int32_t deterministic;  // 1: results of a token depend neither on how its text is divided into batches nor on other
                            // sequences
    int32_t swa_full;     // 1: sliding windows keep all rows, and can go back anywhere; 0: what they read; -1: 0 with a
                          // method, else 1
    uint64_t kv_limit;    // most bytes that lctx_kv_usage may report, 0: none; beyond, LCTX_NO_SLOT
    uint64_t kv_offload;  // bytes for pages of K and V that lie close, while all of them lie in a slower memory
                          // (longheads); 0: no offload
    const char * kv_offload_folder;  // of a file that is this memory; NULL: it is memory of the host
    int32_t mtp;  // 1: the MTP block of the model evaluates every token too, and drafts: lctx_mtp_step. Its cache is
                  // llama.cpp's own
} lctx_context_params;

void lctx_context_params_default(lctx_context_params * params);

// Create a context that runs with a method: "full", "window,n_sink=4", "longheads,chunk_size=64", a rule by which heads
// evict, "corm", "h2o,budget=1024", or both, "longheads+corm". NULL or "": llama.cpp's own KV cache. Never NULL; check
// lctx_context_error.
lctx_context * lctx_context_create(lctx_model * model, const lctx_context_params * params, const char * method);

// Estimate what a context with these parameters would hold when its text fills n_ctx, by device, the host first;
// nothing of that is allocated. Where heads evict: at most, but with corm, whose heads decide for themselves, at least.
// model was loaded dry; params->n_ctx 0 is replaced by what it stands for. Returns how many devices there are, of which
// at most n_max are written, or LCTX_INVALID with the reason in err: what lctx_context_create would refuse.
int32_t lctx_estimate(const lctx_model * model, lctx_context_params * params, const char * method, lctx_sizes * sizes,
                      int32_t n_max, char * err, size_t err_size);

// The message of the last failure on this handle, or NULL.
const char * lctx_context_error(const lctx_context * ctx);

void lctx_context_free(lctx_context * ctx);

// The method with every automatic choice filled in, as a method string, and one line that says what was chosen and why.
const char * lctx_context_method(const lctx_context * ctx);
const char * lctx_context_why(const lctx_context * ctx);

uint32_t lctx_context_n_ctx(const lctx_context * ctx);
uint32_t lctx_context_n_batch(const lctx_context * ctx);
uint32_t lctx_context_n_ubatch(const lctx_context * ctx);

// The llama_context of the handle, for the functions of llama.h; it lives as long as the handle.
void * lctx_context_llama(const lctx_context * ctx);

// Evaluate n_tokens (1 .. n_batch) of sequence 0 at positions pos, pos + 1, ...; pos must be lctx_n_past.
// logits: NULL (nothing is computed), or float[n_vocab] for the last token, or float[n_tokens][n_vocab] with all != 0.
// On any status but LCTX_OK the cache is as before and the contents of logits are undefined. LCTX_NO_SLOT: the cache is
// full. LCTX_LOST: an RPC server ended, and nothing can be evaluated with this model any more. LCTX_ABORTED: the abort
// flag was set. A method that evicts may be left in the middle of a batch longer than lctx_context_step: what was
// evicted cannot come back, lctx_n_past says how far it came.
int32_t lctx_decode(lctx_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t pos, float * logits,
                    int32_t all);

// Evaluate tokens of several sequences, mixed at will, as lctx_decode does; positions of each follow its lctx_n_past.
// outputs[i] != 0: the logits after token i are wanted; they land in logits in the order of the tokens.
int32_t lctx_decode_batch(lctx_context * ctx, int32_t n_tokens, const int32_t * tokens, const int32_t * pos,
                          const int32_t * seqs, const int8_t * outputs, float * logits);

// Of n tokens of a sequence from position pos on, how many one batch may take that can be taken back whole: at least 1.
int32_t lctx_context_step(const lctx_context * ctx, int32_t pos, int32_t n);

// Let queries before position `from` read everything, and later ones choose, in the batches that follow; for a method
// with a choice (longheads). From its window to its own select_from; -1: its own. Rows and index stay as they are: one
// cache can be read in two ways. 1 done, 0 refused and nothing changed: lctx_context_error says why.
int32_t lctx_context_select_from(lctx_context * ctx, int32_t from);

// The number of positions of a sequence in the cache.
int32_t lctx_n_past(const lctx_context * ctx, int32_t seq);

// Sequences are 0 .. n_seq_max - 1. Functions that ask for another one are refused, or change nothing.

// Remove positions [p0, p1) (p0 < 0: from the beginning, p1 < 0: to the end). 1 done, 0 refused and nothing changed:
// lctx_context_error says why.
int32_t lctx_seq_rm(lctx_context * ctx, int32_t seq, int32_t p0, int32_t p1);

// The longest prefix of at most n positions that lctx_seq_rm(ctx, seq, prefix, -1) can cut the sequence back to; 0 for
// no sequence.
int32_t lctx_seq_restorable(const lctx_context * ctx, int32_t seq, int32_t n);

// Says how far a sequence goes back without a checkpoint: to any position but where heads have evicted; as far as the
// cells of its sliding windows reach, at least the last ubatch; not at all, since a recurrent state only goes forward.
enum lctx_rollback { LCTX_ROLLBACK_FREE = 0, LCTX_ROLLBACK_WINDOW = 1, LCTX_ROLLBACK_NONE = 2 };

int32_t lctx_context_rollback(const lctx_context * ctx);

// Keep, in memory of the host, what is needed to cut the sequence back to its end of now: sliding windows and recurrent
// states, which cannot go back by themselves. Up to 16 of a sequence are kept, fewer where all of the context would
// take more than 1 GiB, but 2 in any case; then the one goes whose neighbors are nearest. Without a method the last one
// is kept, and only of recurrent states. Nothing happens where the rollback is free. 1 done, 0 failed.
int32_t lctx_seq_checkpoint(lctx_context * ctx, int32_t seq);

// The positions of the last checkpoints of a sequence, ascending: those that its saved state has, which a restored
// sequence can be cut back to. Returns how many there are, at most n of them are written; 0 without a method.
int32_t lctx_seq_checkpoints(const lctx_context * ctx, int32_t seq, int32_t * positions, int32_t n);

// The last position up to pos where a checkpoint helps when the text has grown: earlier than pos where the cache cannot
// be cut at pos, since queries are kept of the last chunk only.
int32_t lctx_context_cut_before(const lctx_context * ctx, int32_t pos);

// Make dst an exact copy of the first n positions of src (n < 0: all); src itself stays as it is. 1 done, 0 refused and
// nothing changed.
int32_t lctx_seq_cp(lctx_context * ctx, int32_t src, int32_t dst, int32_t n);

// Compression, for a method with a rule that waits for it: a text is evaluated and replayed, and loses the rows to
// which the replay did not attend (kvzip); or its last `window` tokens are evaluated as the replay, and stay (snapkv).
//
// While a sequence is replayed (on != 0), the queries of its new tokens vote for the rows before them, and lctx_seq_rm
// takes the tokens back but not their votes. Begin it where the text ends, or with snapkv where the window begins;
// votes of an earlier replay are forgotten. Returns after how many tokens at most the sequence can still be cut back to
// here, 0 with on == 0; LCTX_INVALID: lctx_context_error says why.
int32_t lctx_seq_replay(lctx_context * ctx, int32_t seq, int32_t on);

// Let queries of a replay read their own piece of the text (kvzip with full attention): they read rows [first, end) and
// the first 8 only, until the next call or the end of the replay. 1 done; 0: they read all rows; LCTX_INVALID:
// lctx_context_error says why.
int32_t lctx_seq_replay_piece(lctx_context * ctx, int32_t seq, int32_t first, int32_t end);

// Keep of all layers and KV heads together the rows with the largest votes: this fraction (above 0, at most 1) of what
// a full cache holds of the text. Pages without rows are freed, and the replay ends. The sequence cannot be cut back to
// before the end of the text. 1 done, 0 refused and nothing changed: lctx_context_error says why.
int32_t lctx_seq_compress(lctx_context * ctx, int32_t seq, double fraction);

// Forget all other sequences.
void lctx_seq_keep(lctx_context * ctx, int32_t seq);

// Save and restore: one sequence, or all with seq < 0, with their last checkpoints (lctx_seq_checkpoints). Size and
// get: bytes, 0 on failure. Set: bytes read, 0 when the state does not fit (another method, type, model or version), or
// is none that a context could have saved; the sequence is empty then. lctx_context_error says why.
size_t lctx_state_size(lctx_context * ctx, int32_t seq);
size_t lctx_state_get(lctx_context * ctx, int32_t seq, uint8_t * buf, size_t size);
size_t lctx_state_set(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size);

// Slices of a sequence, for texts that are stored in parts: the rows of some positions and their planes, from a
// multiple of 64 to where the sequence can be cut. Consecutive slices are the sequence again, in any context of the
// same model, method and types. Windows and recurrent states are only known at its end: they are stored apart, and
// complete a sequence that was made of slices. LCTX_SLICES_NONE: there is no method, or heads evict, so only whole
// states are saved. With full,spans=N+kvzip a compressed text is one slice with the rows it kept.
enum lctx_slice_kind { LCTX_SLICES_NONE = 0, LCTX_SLICES_ROWS = 1, LCTX_SLICES_AND_FOREIGN = 2 };

int32_t lctx_context_slices(const lctx_context * ctx);

// Bytes of the slice [first, end) of a sequence, and of its windows and recurrent states at its end; with buf NULL they
// are only counted. 0 on failure: lctx_context_error says why.
size_t lctx_slice_get(lctx_context * ctx, int32_t seq, int32_t first, int32_t end, uint8_t * buf, size_t size);
size_t lctx_foreign_get(lctx_context * ctx, int32_t seq, uint8_t * buf, size_t size);

// Append a slice to the sequence whose end is its beginning; complete the sequence. 1 done, 0 refused:
// lctx_context_error says why. The sequence ends where it did after a slice, and is empty after a foreign state that
// does not fit.
int32_t lctx_slice_append(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size);
int32_t lctx_foreign_set(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size);

// With method "full,spans=N" a sequence consists of up to N spans of rows, each seen from a distance of its own. Models
// with windows or recurrent states are refused. 1 done, 0 refused and nothing changed: lctx_context_error says why.
// Append n rows of a slice after its first `skip`, wherever it was read: as if they followed the sequence, except for
// what they have read.
int32_t lctx_slice_insert(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size, int32_t skip, int32_t n);
// Remove rows [first, end) of a sequence. Later rows move down, and have read what was removed.
int32_t lctx_seq_drop(lctx_context * ctx, int32_t seq, int32_t first, int32_t end);
// Return how many rows from the beginning have read all rows before them, and no other: all but after the first of
// these.
int32_t lctx_seq_exact(const lctx_context * ctx, int32_t seq);

// Forget everything.
void lctx_clear(lctx_context * ctx);

// While *flag != 0, a running lctx_decode stops at the next graph node of the CPU; other devices finish what they have
// begun. The flag must outlive the context; NULL: none.
void lctx_context_set_abort(lctx_context * ctx, const volatile int32_t * flag);

// KV memory of the context as it is: evictions that are due are done when the next token comes. rows: NULL or
// int32[n_layer][n_head_kv], rows held per layer and KV head. LCTX_INVALID when the context runs without a method.
int32_t lctx_kv_usage(const lctx_context * ctx, lctx_kv_info * info, int32_t * rows);

int32_t lctx_offload_usage(const lctx_context * ctx, lctx_offload_info * info);

// The rows that a KV head of a layer holds, ascending, and their scores (integers or the bits of floats, by the rule).
// rows, scores: NULL or int32[n_max]. Returns the number of rows, 0 for a head that does not exist.
int32_t lctx_seq_held(const lctx_context * ctx, int32_t seq, int32_t layer, int32_t head, int32_t * rows,
                      int32_t * scores, int32_t n_max);

// LCTX_INVALID when the context runs without a method.
int32_t lctx_context_work(const lctx_context * ctx, lctx_work * work);

// ---- drafts by the MTP block of the model ----

// 1 when the hidden state of the last token of a sequence is known, so that the block can draft after it; else 0. It is
// not known after tokens that were evaluated elsewhere (states, slices), or where more was taken back than the last
// batch, until the next token.
int32_t lctx_mtp_ready(const lctx_context * ctx, int32_t seq);

// Evaluate in the block a token of each of n_tokens different sequences, at lctx_n_past of the sequence, or right after
// its last step. logits: float[n_tokens][n_vocab], by which the block predicts the tokens after these. Sequences stay
// as they are: the next lctx_decode forgets the steps.
int32_t lctx_mtp_step(lctx_context * ctx, int32_t n_tokens, const int32_t * tokens, const int32_t * pos,
                      const int32_t * seqs, float * logits);

// ---- which chunks were read ----

// Record the chunks that every layer and head reads for the queries of one sequence at positions [p0, p1), and forget
// what was recorded before; p1 <= p0 stops. LCTX_INVALID when the method chooses no chunks or there is no such
// sequence. A run that does not record is not slowed.
int32_t lctx_trace_start(lctx_context * ctx, int32_t seq, int32_t p0, int32_t p1);

// Get what was recorded, by position. pos: NULL or int32[n_query]; chunks: NULL or
// int32[n_query][n_layer][n_head][n_read], ascending, then -1 where there are fewer. LCTX_FAILED: memory ran out while
// recording, later queries are missing.
int32_t lctx_trace_get(const lctx_context * ctx, lctx_trace_info * info, int32_t * pos, int32_t * chunks);

// ---- LoRA ----

typedef struct lctx_adapter lctx_adapter;

// Load a LoRA adapter from a GGUF file. Never NULL but when out of memory; check lctx_adapter_error. Free it before the
// model.
lctx_adapter * lctx_adapter_load(lctx_model * model, const char * path);
const char * lctx_adapter_error(const lctx_adapter * adapter);
void lctx_adapter_free(lctx_adapter * adapter);

// The adapters of a context from now on, none with n = 0, with scales from -10^4 to 10^4; they must outlive it or be
// replaced. What is in the cache stays as it is.
int32_t lctx_context_set_adapters(lctx_context * ctx, int32_t n, lctx_adapter ** adapters, const float * scales);

// ---- embeddings ----

// The pooling of a context: 0 none, 1 mean, 2 cls, 3 last, 4 rank.
int32_t lctx_context_pooling(const lctx_context * ctx);

// Numbers per embedding.
int32_t lctx_embedding_size(const lctx_context * ctx);

// Embed n_text texts, tokens one after the other, lengths[i] of text i (together at most n_batch and n_ubatch); the
// cache is empty afterwards. out: float[n_text][size], or without pooling float[sum of lengths][size].
int32_t lctx_embed(lctx_context * ctx, int32_t n_text, const int32_t * lengths, const int32_t * tokens, float * out);

// [cdef end]

#ifdef __cplusplus
}
#endif
