// The part of the C API that the rooms below it know: status codes, and what contexts report in numbers. The block
// between the markers is part of the cffi cdef.
#pragma once

#include <stdint.h>

// [cdef begin]

// Status codes: those of llama_decode. Everything below zero is an error whose message *_error() holds.
enum lctx_status {
    LCTX_OK = 0,
    LCTX_NO_SLOT = 1,
    LCTX_ABORTED = 2,
    LCTX_INVALID = -1,
    LCTX_FAILED = -2,
    LCTX_LOST = -3
};

// Counts the bytes that a context holds on one device.
typedef struct lctx_sizes {
    const char * device;  // a string of the library, never freed; "CPU": memory of the host
    uint64_t weights;
    uint64_t k;        // rows in pages; in llama.cpp's own cache all that it keeps of keys
    uint64_t v;        // the same for values
    uint64_t chunks;   // keys in few bits, or summaries of chunks and queries of the open one
    uint64_t near;     // keys at exact positions, next to grouped ones
    uint64_t other;    // block tables, lists of the rows that heads hold
    uint64_t disk;     // rows in a file, with kv_offload
    uint64_t foreign;  // sliding windows and recurrent states, which are llama.cpp's own, with their checkpoints at
                       // most; of a hybrid without a method also keys and values; the cache of an MTP block
    uint64_t compute;  // of graphs
    uint64_t free;     // of the device; 0: it does not tell, or is the host
} lctx_sizes;

typedef struct lctx_kv_info {
    uint64_t bytes;  // of K and V in pages that hold rows now, near keys, what is kept of chunks, and the lists of rows
    uint64_t peak_bytes;     // most bytes ever held
    uint64_t full_bytes;     // what a full cache of the same types holds for the same tokens
    uint64_t foreign_bytes;  // in addition to these: what stays llama.cpp's own (sliding windows, recurrent states),
                             // and checkpoints
    // Of devices that map memory in grains (2 MiB on an NVIDIA GPU): all that is mapped for the method; 0 where there
    // is none such
    uint64_t mapped_bytes;
    int32_t n_layer;
    int32_t n_head_kv;  // largest over the layers
} lctx_kv_info;

// Units of rows with kv_offload: chunks where these divide 64 rows, else 64 rows. Counts are of all layers and heads,
// since the context was created. Close: on the device of a layer; far: in memory of the host, or in a file.
typedef struct lctx_offload_info {
    uint64_t n_hit;   // units that lay close when they were wanted
    uint64_t n_miss;  // units that were brought
    uint64_t n_far;   // units that were read from far: more were wanted at once than fit
    uint64_t device_bytes;
    uint64_t unit_bytes;  // of one unit: K and V of one head
    uint64_t file_bytes;  // of the disk that the file has, where it has K and V; else 0, as what follows
    uint64_t read_bytes;
    uint64_t written_bytes;
    double file_seconds;  // of all threads, in calls that read and write
    int32_t n_staged;     // units of a head that lie close; 0: no kv_offload
    int32_t n_chosen;     // units of a head that one query reads at most where it chooses
} lctx_offload_info;

// Counts what the host has done in addition to the kernels since the context was created: per token none of it may grow
// with the tokens before.
typedef struct lctx_work {
    int64_t n_graph;      // evaluations of the model's graph, one per ubatch
    int64_t n_built;      // graphs that were built for them; the others ran one again
    int64_t n_evict;      // evaluations of the graph that evicts, which is built once
    int64_t n_table;      // entries of block tables that were read or written
    int64_t input_bytes;  // written into the inputs of graphs for positions, rows, segments and voters
    int64_t n_wait;       // times that a device was waited for: not by llama.cpp, and not on the CPU
    int64_t n_sent;       // copies of rows and lists to a device, as of a state that is restored
} lctx_work;

// Shape of a record of the chunks that were read (lctx_trace_get).
typedef struct lctx_trace_info {
    int32_t n_query;  // queries recorded
    int32_t n_layer;
    int32_t n_head;  // largest over the layers
    int32_t n_read;  // chunks that a query reads at most
    int32_t chunk_size;
} lctx_trace_info;

// [cdef end]
