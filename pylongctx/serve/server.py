"""Running the server until a signal ends it, with a time limit for the head of a request."""

import asyncio
import ctypes
import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pylongctx._log import LOG
from pylongctx.errors import DeviceLost
from pylongctx.serve.app import create_app
from pylongctx.serve.service import Service, Settings

HEAD_PATIENCE = 20.0  # seconds from the connection, or the first byte of a request, to the end of its headers
M_ARENA_MAX = -8  # of mallopt
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # an address that this machine does not have


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a timeout for unfinished requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read data without extending the timeout for a started head."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_PATIENCE, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def share_heaps() -> None:
    """Let all new threads share two heaps, like MALLOC_ARENA_MAX=2.

    By default glibc gives each thread its own heap, which keeps freed memory; a server has many mostly idle threads.
    """
    with suppress(AttributeError):  # another libc without such heaps
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """Return a listening socket, ``shared`` with other processes; OSError when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, reuse_port=shared)
    except OSError as reason:
        raise OSError(f"cannot listen on {host}:{port}, choose another --host or --port: {reason}") from reason
    # inherited by connections; asyncio does not set it for this kind of socket, which delays packets by 40 ms
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextmanager
def listening(hosts: Sequence[str], port: int, shared: bool = False) -> Iterator[list[socket.socket]]:
    """Listen while the block runs: at all addresses of each host, and at Unix sockets, whose paths end with ``.sock``.

    With port 0, all addresses have the port that is free for the first one. OSError when none of a host can be used.
    """
    with ExitStack() as stack:
        found: list[socket.socket] = []
        for host in hosts:
            if is_path(host):
                found.append(stack.enter_context(_unix_socket(host)))
                continue
            for listener in _at_addresses(host, port, shared):
                found.append(stack.enter_context(listener))
                port = port or listener.getsockname()[1]
        yield found


def is_path(host: str) -> bool:
    """Return True if a host is the path of a Unix socket, as llama-server reads it."""
    return host.endswith(".sock")


def _at_addresses(host: str, port: int, shared: bool) -> Iterator[socket.socket]:
    """Yield a socket for each address of a host; addresses that this machine does not have are left out."""
    lacking: list[OSError] = []
    addresses = _addresses(host)
    for address in addresses:
        try:
            listener = listen(address, port, shared)
        except OSError as reason:
            if not isinstance(reason.__cause__, OSError) or reason.__cause__.errno not in NOT_HERE:
                raise
            lacking.append(reason)
            continue
        port = port or listener.getsockname()[1]
        yield listener
    if len(lacking) == len(addresses):
        raise lacking[0]
    for missing in lacking:
        LOG.info("%s", missing)


def _addresses(host: str) -> list[str]:
    """Return the addresses of a host, those of IPv4 first; an address is its own, with the zone that it may have."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return [host]
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as reason:
        raise OSError(f"cannot listen on {host}, choose another --host: {reason}") from reason
    found = sorted(infos, key=lambda info: info[0] != socket.AF_INET)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


@contextmanager
def _unix_socket(path: str) -> Iterator[socket.socket]:
    """Listen at a path while the block runs; a socket that an ended process has left there is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
    except OSError as reason:
        listener.close()
        raise OSError(f"cannot listen on {path}, choose another --host: {reason}") from reason
    try:
        with listener:
            yield listener
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _is_left_over(path: str) -> bool:
    """Return True for a socket at which nobody listens."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def serve(service: Service, listeners: list[socket.socket]) -> int:
    """Serve until SIGINT or SIGTERM; then running requests have ``grace`` seconds. Returns the exit status.

    It ends with status 1 when a device is lost.
    """
    expect_signals()
    gc.collect()
    gc.freeze()  # garbage of requests is collected faster when older objects are skipped
    server = make_server(create_app(service), service.settings)

    def end() -> None:
        server.should_exit = True

    service.engine.on_lost = end
    server.run(listeners)
    if isinstance(service.engine.failure, DeviceLost):
        LOG.error("error: %s", service.engine.failure)
        return 1
    if service.is_stuck:
        LOG.warning("a step or a request did not end in time: the process exits without freeing the model")
        logging.shutdown()
        os._exit(1)
    return 0


def expect_signals() -> None:
    """Let SIGINT and SIGTERM end the process with status 0."""
    # uvicorn handles these signals and raises them again at its end; the default handlers would report a failure
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def make_server(app: FastAPI, settings: Settings) -> uvicorn.Server:
    """Return uvicorn with an application."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(settings.grace)),
        lifespan="on",
        ssl_certfile=settings.tls and settings.tls[0],
        ssl_keyfile=settings.tls and settings.tls[1],
    )
    return uvicorn.Server(config)


@contextmanager
def inherited(number: int) -> Iterator[list[socket.socket]]:
    """Listen at the socket passed by the parent process; this process ends with its parent."""

    def watch() -> None:
        while os.read(0, 1):  # standard input only ends, it has no data
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="pylongctx-parent", daemon=True).start()
    with socket.socket(fileno=number) as listener:
        yield [listener]


def announce(listeners: list[socket.socket], settings: Settings) -> None:
    """Log the addresses of the server, and warn if others can use one of them."""
    scheme = "https" if settings.tls else "http"
    for listener in listeners:
        LOG.info("serving at %s", _shown(listener, scheme, settings.prefix))
    if not settings.api_keys and not all(map(_is_of_this_machine, listeners)):
        LOG.warning(
            "anyone who reaches this address can use the server; set --api-key, and put a proxy with TLS in front of it"
        )


def _shown(listener: socket.socket, scheme: str, prefix: str) -> str:
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{prefix}"


def _is_of_this_machine(listener: socket.socket) -> bool:
    return listener.family == socket.AF_UNIX or ipaddress.ip_address(listener.getsockname()[0]).is_loopback
