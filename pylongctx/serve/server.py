"""Running the server until a signal ends it, with a time limit for the head of a request."""

import asyncio
import ctypes
import gc
import ipaddress
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
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


def serve(service: Service, listener: socket.socket) -> int:
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
    server.run([listener])
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


def inherited(number: int) -> socket.socket:
    """Return the socket passed by the parent process; this process ends with its parent."""

    def watch() -> None:
        while os.read(0, 1):  # standard input only ends, it has no data
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="pylongctx-parent", daemon=True).start()
    return socket.socket(fileno=number)


def announce(listener: socket.socket, settings: Settings) -> None:
    """Log the address of the server, and warn if others can use it."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    LOG.info("serving at %s://%s:%d%s", "https" if settings.tls else "http", shown, port, settings.prefix)
    if not (settings.api_keys or ipaddress.ip_address(host).is_loopback):
        LOG.warning(
            "anyone who reaches this address can use the server; set --api-key, and put a proxy with TLS in front of it"
        )
