// A TCP connection to another program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

class lctx_connection {
  public:
    // No call waits longer than this; on Windows, connecting takes as long as the system lets it.
    explicit lctx_connection(int timeout_seconds) : timeout_seconds_(timeout_seconds) {}
    lctx_connection(const lctx_connection &) = delete;
    lctx_connection & operator=(const lctx_connection &) = delete;
    ~lctx_connection();

    enum class reached { yes, unknown_host, no };  // no: lctx_system_error() says why
    // Connect to a host by name or address (IPv4), once.
    reached open(const std::string & host, const std::string & port);

    // Send all bytes; false when that fails, and lctx_system_error() says why.
    bool send(const void * data, size_t size);

    enum class received { all, late, less };  // late: nothing came in time; less: the other side hung up
    received receive(void * to, size_t size);

  private:
    const int timeout_seconds_;
    intptr_t socket_ = -1;
};
