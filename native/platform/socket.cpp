#include "socket.h"

#include <memory>

#ifdef _WIN32

#include <winsock2.h>
#include <ws2tcpip.h>

namespace {

void begin() {
    [[maybe_unused]] static const int started = [] {
        WSADATA data = {};
        return WSAStartup(MAKEWORD(2, 2), &data);
    }();
}

void end(intptr_t socket) {
    closesocket((SOCKET)socket);
}

bool is_late() {
    return WSAGetLastError() == WSAETIMEDOUT;
}

DWORD timeout_of(int seconds) {
    return (DWORD)seconds * 1000;
}

constexpr int SEND_FLAGS = 0;

}  // namespace

#else

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include <cerrno>

namespace {

void begin() {}

void end(intptr_t socket) {
    close((int)socket);
}

bool is_late() {
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

timeval timeout_of(int seconds) {
    return {seconds, 0};
}

// no signal when the other side has hung up
#ifdef MSG_NOSIGNAL
constexpr int SEND_FLAGS = MSG_NOSIGNAL;
#else
constexpr int SEND_FLAGS = 0;
#endif

}  // namespace

#endif

lctx_connection::~lctx_connection() {
    if (socket_ != -1) {
        end(socket_);
    }
}

lctx_connection::reached lctx_connection::open(const std::string & host, const std::string & port) {
    begin();
    addrinfo hints = {}, *found = nullptr;
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) {
        return reached::unknown_host;
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo *)> addresses(found, [](addrinfo * a) { freeaddrinfo(a); });
    socket_ = (intptr_t)socket(found->ai_family, found->ai_socktype, found->ai_protocol);
    if (socket_ == -1) {
        return reached::no;
    }
    const auto timeout = timeout_of(timeout_seconds_);
    setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, (const char *)&timeout, sizeof(timeout));  // of connect too
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, (const char *)&timeout, sizeof(timeout));
#ifdef SO_NOSIGPIPE
    const int on = 1;
    setsockopt(socket_, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
    return connect(socket_, found->ai_addr, (int)found->ai_addrlen) == 0 ? reached::yes : reached::no;
}

bool lctx_connection::send(const void * data, size_t size) {
    return ::send(socket_, (const char *)data, (int)size, SEND_FLAGS) == (int)size;
}

lctx_connection::received lctx_connection::receive(void * to, size_t size) {
    const auto n = ::recv(socket_, (char *)to, (int)size, MSG_WAITALL);
    return n == (int)size ? received::all : n < 0 && is_late() ? received::late : received::less;
}
