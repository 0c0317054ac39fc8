// RPC servers: other machines, or processes, whose memory and processors are devices of this one.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <memory>
#include <string>
#include <vector>

// One connection. ggml ends the process when it finds no server, or loses it; so a server is asked first, and the connection is kept as
// long as somebody needs it.
struct lctx_rpc_server {
    std::string endpoint;  // "host:port"
    std::vector<ggml_backend_dev_t> devices;
    ggml_backend_ptr connection;
};

// Connect, or share the connection that there is. Throws lctx_refusal with the reason.
std::shared_ptr<lctx_rpc_server> lctx_rpc_connect(const std::string & endpoint);

// The endpoints of "host:port,host:port". Throws lctx_refusal.
std::vector<std::string> lctx_rpc_endpoints(const std::string & text);

// Serve the devices on an address (IPv4) until the process ends; throws lctx_refusal when that cannot be.
[[noreturn]] void lctx_rpc_serve_devices(const std::string & endpoint, std::vector<ggml_backend_dev_t> devices, int32_t n_threads);
