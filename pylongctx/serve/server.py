"""Running the server until a signal ends it."""

import ipaddress
import signal
import socket
import sys

import uvicorn

from pylongctx.serve.app import create_app
from pylongctx.serve.service import Service


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; OSError when the address cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as reason:
        raise OSError(f"cannot listen on {host}:{port}, choose another --host or --port: {reason}") from reason


def serve(service: Service, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM: running requests have ``grace`` seconds then."""
    # uvicorn handles these signals and raises them again at its end, where the defaults would make it a failure
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    make_server(service).run([listener])


def make_server(service: Service) -> uvicorn.Server:
    """Return uvicorn with the application of a service."""
    grace = max(1, round(service.settings.grace))
    app = create_app(service)
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace, lifespan="on")
    )


def announce(listener: socket.socket, protected: bool) -> None:
    """Say where the server is, and warn when others can use it."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"pylongctx: serving at http://{shown}:{port}", file=sys.stderr, flush=True)
    if not (protected or ipaddress.ip_address(host).is_loopback):
        print(
            "pylongctx: warning: anyone who reaches this address can use the server; set --api-key, "
            "and put a proxy with TLS in front of it",
            file=sys.stderr,
            flush=True,
        )
