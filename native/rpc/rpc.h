// RPC servers: other machines, or processes, whose memory and processors are devices of this one.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

// One connection. ggml ends the process when it finds no server; so a server is asked first, and the connection is kept
// while it is in use. A server that has ended answers zeros (patches/ggml-rpc-lost), so callers must check whether it
// is lost.
struct lctx_rpc_server {
    std::string endpoint;  // "host:port"
    std::vector<ggml_backend_dev_t> devices;
    ggml_backend_ptr connection;
    std::atomic<bool> lost{false};
};

// Make an exception of ggml's abort when a server ends while a connection is made. Other aborts end the process as
// before.
void lctx_rpc_watch_aborts();

// Return why nothing can be done with these servers any more; empty while all are there.
std::string lctx_rpc_lost(const std::vector<std::shared_ptr<lctx_rpc_server>> & servers);

// Connect, or share the connection that there is. Throws lctx_refusal with the reason.
std::shared_ptr<lctx_rpc_server> lctx_rpc_connect(const std::string & endpoint);

// The endpoints of "host:port,host:port". Throws lctx_refusal.
std::vector<std::string> lctx_rpc_endpoints(const std::string & text);

// A server forgets its last graph when a buffer is freed, and ggml may still ask for that graph again, which ends the
// process. Run an empty one, so that the next graph of whatever context is sent as a whole: after anything that may
// have freed buffers.
void lctx_rpc_forget_graphs(const std::vector<std::shared_ptr<lctx_rpc_server>> & servers);

// Serve the devices on an address (IPv4) until the process ends; throws lctx_refusal when that cannot be.
[[noreturn]] void lctx_rpc_serve_devices(const std::string & endpoint, std::vector<ggml_backend_dev_t> devices,
                                         int32_t n_threads);
