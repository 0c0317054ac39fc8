// The last number of the RPC version, by which client and server know that they run the same ops. ggml-rpc.cpp includes it.
#pragma once

#include "ggml-rpc.h"

// 128 to 254: upstream's own numbers are small. Made from the version of pylongctx, the pinned llama.cpp and the patches; two that
// differ agree by chance, one in 127.
__attribute__((visibility("hidden"))) int lctx_rpc_version();

#undef RPC_PROTO_PATCH_VERSION
#define RPC_PROTO_PATCH_VERSION lctx_rpc_version()
