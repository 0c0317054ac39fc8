#include "rpc.h"

#include "../base/firewall.h"
#include "../base/refusal.h"
#include "../platform/socket.h"
#include "../platform/system.h"
#include "../rpc-version.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#ifndef LCTX_BUILD
#error "CMake defines LCTX_BUILD"
#endif

namespace {

constexpr int TIMEOUT_SECONDS = 10;

// The first message of ggml's RPC protocol and its answer: command, size, then what the sides can do.
constexpr uint8_t HELLO = 14;
constexpr uint64_t N_CAPS = 24;
struct hello_answer {
    uint8_t size[sizeof(uint64_t)];
    uint8_t major, minor, patch, padding;
    uint8_t caps[N_CAPS];
};
static_assert(sizeof(hello_answer) == sizeof(uint64_t) + 4 + N_CAPS, "as it is sent");

[[noreturn]] void refuse(const std::string & endpoint, const std::string & reason) {
    throw lctx_refusal("RPC server " + endpoint + ": " + reason);
}

// Host and port, which must be a number.
std::pair<std::string, std::string> split(const std::string & endpoint) {
    const size_t colon = endpoint.find(':');
    const std::string port = colon == std::string::npos ? "" : endpoint.substr(colon + 1);
    const bool is_number =
        !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
    if (colon == 0 || !is_number || std::stoi(port) < 1 || std::stoi(port) > 65535) {
        refuse(endpoint, "servers are given as host:port, for instance 192.168.1.2:50052");
    }
    return {endpoint.substr(0, colon), port};
}

void connect_to(lctx_connection & connection, const std::string & endpoint) {
    const auto [host, port] = split(endpoint);
    switch (connection.open(host, port)) {
        case lctx_connection::reached::yes:          return;
        case lctx_connection::reached::unknown_host: refuse(endpoint, "the host is not known");
        case lctx_connection::reached::no:
            refuse(endpoint, "no connection (" + lctx_system_error() + "); start it with: pylongctx rpc-server");
    }
}

// Greet the server as ggml would, and hang up.
void probe(const std::string & endpoint) {
    lctx_connection server(TIMEOUT_SECONDS);
    connect_to(server, endpoint);
    uint8_t greeting[1 + sizeof(N_CAPS) + N_CAPS] = {HELLO};
    memcpy(greeting + 1, &N_CAPS, sizeof(N_CAPS));
    hello_answer answer = {};
    if (!server.send(greeting, sizeof(greeting))) {
        refuse(endpoint, "it does not listen (" + lctx_system_error() + ")");
    }
    const lctx_connection::received received = server.receive(&answer, sizeof(answer));
    if (received == lctx_connection::received::late) {
        refuse(endpoint, "it does not answer: it serves another client (one at a time), or it is not an RPC server");
    }
    if (received == lctx_connection::received::less) {
        refuse(endpoint, "it hung up: it is not an RPC server, or one of another version");
    }
    const auto version = [](int major, int minor, int patch) {
        return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
    };
    if (answer.major != RPC_PROTO_MAJOR_VERSION || answer.minor > RPC_PROTO_MINOR_VERSION ||
        answer.patch != RPC_PROTO_PATCH_VERSION) {
        refuse(endpoint, "it speaks version " + version(answer.major, answer.minor, answer.patch) + ", this is " +
                             version(RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION, RPC_PROTO_PATCH_VERSION) +
                             "; start pylongctx rpc-server of the same version there");
    }
}

// A function of the RPC backend, which may be left out of a build.
template <typename F> F * rpc_function(const char * name) {
    ggml_backend_reg_t reg = ggml_backend_reg_by_name("RPC");
    void * found = reg ? ggml_backend_reg_get_proc_address(reg, name) : nullptr;
    if (!found) {
        throw lctx_refusal("this build of pylongctx has no RPC backend; build it with -DGGML_RPC=ON");
    }
    return (F *)found;
}

// The servers in use. The mutex is recursive: ggml may abort while a connection is made.
std::recursive_mutex servers_mutex;
std::map<std::string, std::weak_ptr<lctx_rpc_server>> servers_by_endpoint;

void on_abort(const char * message) {
    const std::string text = message;
    if (text.find("ggml-rpc.cpp:") != std::string::npos) {
        if (lctx_guard_depth > 0 && std::uncaught_exceptions() == 0) {
            throw lctx_refusal("an RPC server ended while a connection to it was made");
        }
        fprintf(stderr, "pylongctx ends: an RPC server ended while a connection to it was made (%s)\n", message);
        abort();
    }
    const size_t line = text.find(':'), rest = text.find(": ", line + 1);
    ggml_set_abort_callback(nullptr);
    if (line == std::string::npos || rest == std::string::npos) {
        ggml_abort("llama.cpp", 0, "%s", message);
    }
    ggml_abort(text.substr(0, line).c_str(), atoi(message + line + 1), "%s", message + rest + 2);
}

}  // namespace

void lctx_rpc_note_lost(const char * endpoint, void * output, size_t output_size) {
    if (output_size > 0) {
        memset(output, 0, output_size);
    }
    const std::lock_guard<std::recursive_mutex> lock(servers_mutex);
    const auto known = servers_by_endpoint.find(endpoint);
    if (const std::shared_ptr<lctx_rpc_server> server =
            known == servers_by_endpoint.end() ? nullptr : known->second.lock()) {
        server->lost = true;
    }
}

void lctx_rpc_watch_aborts() {
    ggml_set_abort_callback(on_abort);
}

std::string lctx_rpc_lost(const std::vector<std::shared_ptr<lctx_rpc_server>> & servers) {
    std::string lost;
    for (const auto & server : servers) {
        if (server->lost) {
            lost += (lost.empty() ? "" : ", ") + server->endpoint;
        }
    }
    return lost.empty()
               ? ""
               : "RPC server " + lost + " ended, or the connection to it broke; close this model, and open it again";
}

int lctx_rpc_version() {
    uint32_t hash = 2166136261;  // FNV-1a
    for (const char c : std::string(LCTX_BUILD)) {
        hash = (hash ^ (uint8_t)c) * 16777619;
    }
    return 128 + (int)(hash % 127);
}

std::vector<std::string> lctx_rpc_endpoints(const std::string & text) {
    std::vector<std::string> endpoints;
    for (size_t from = 0; !text.empty() && from <= text.size();) {
        const size_t end = std::min(text.find(',', from), text.size());
        endpoints.push_back(text.substr(from, end - from));
        split(endpoints.back());
        from = end + 1;
    }
    if (endpoints.size() > GGML_RPC_MAX_SERVERS) {
        throw lctx_refusal("at most " + std::to_string(GGML_RPC_MAX_SERVERS) + " RPC servers");
    }
    return endpoints;
}

std::shared_ptr<lctx_rpc_server> lctx_rpc_connect(const std::string & endpoint) {
    const std::lock_guard<std::recursive_mutex> lock(servers_mutex);
    if (std::shared_ptr<lctx_rpc_server> known = servers_by_endpoint[endpoint].lock()) {
        if (known->lost) {
            refuse(endpoint, "the connection to it was lost: close the model that has used it, then open it again");
        }
        return known;
    }
    auto * add_server = rpc_function<decltype(ggml_backend_rpc_add_server)>("ggml_backend_rpc_add_server");
    probe(endpoint);
    ggml_backend_reg_t reg = add_server(endpoint.c_str());
    if (!reg || ggml_backend_reg_dev_count(reg) == 0) {
        refuse(endpoint, "it has no devices");
    }
    auto server = std::make_shared<lctx_rpc_server>();
    server->endpoint = endpoint;
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
        server->devices.push_back(ggml_backend_reg_dev_get(reg, i));
    }
    server->connection.reset(ggml_backend_dev_init(server->devices[0], nullptr));
    servers_by_endpoint[endpoint] = server;
    return server;
}

void lctx_rpc_forget_graphs(const std::vector<std::shared_ptr<lctx_rpc_server>> & servers) {
    for (const auto & server : servers) {
        if (server->lost) {
            continue;
        }
        for (ggml_backend_dev_t dev : server->devices) {
            const ggml_context_ptr ctx(
                ggml_init({ggml_tensor_overhead() + ggml_graph_overhead_custom(1, false), nullptr, true}));
            ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 1, false);
            ggml_graph_add_node(graph, ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, 1));  // no op, no memory
            const ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
            ggml_backend_graph_compute(backend.get(), graph);
        }
    }
}

void lctx_rpc_serve_devices(const std::string & endpoint, std::vector<ggml_backend_dev_t> devices, int32_t n_threads) {
    split(endpoint);
    auto * serve = rpc_function<decltype(ggml_backend_rpc_start_server)>("ggml_backend_rpc_start_server");
    serve(endpoint.c_str(), nullptr, (size_t)n_threads, devices.size(), devices.data());
    throw lctx_refusal("cannot listen on " + endpoint + " (" + lctx_system_error() +
                       "): give an IPv4 address of this machine and a free port");
}
