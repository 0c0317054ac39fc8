// ggml-rpc.cpp includes this: the last number of the RPC version, by which client and server know that they run the
// same ops, and the end of a server.
#pragma once

#include "ggml-rpc.h"

#include <cstddef>

// 128 to 254: upstream's own numbers are small. Made from the version of pylongctx, the pinned llama.cpp and the
// patches; two that differ agree by chance, one in 127.
__attribute__((visibility("hidden"))) int lctx_rpc_version();

// Called by the thread that talks to a server when that has ended: what was asked is answered with zeros, and the
// server is lost.
__attribute__((visibility("hidden"))) void lctx_rpc_note_lost(const char * endpoint, void * output, size_t output_size);

#undef RPC_PROTO_PATCH_VERSION
#define RPC_PROTO_PATCH_VERSION lctx_rpc_version()
