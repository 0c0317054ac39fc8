"""Running the server until a signal ends it."""

import ipaddress
import signal
import sys

import uvicorn

from pylongctx.serve.app import create_app
from pylongctx.serve.service import Service


def run(service: Service, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM: running requests have ``grace`` seconds then."""
    if not is_loopback(host) and not service.settings.api_keys:
        print(
            f"pylongctx: warning: anyone who reaches {host}:{port} can use this server; set --api-key, "
            "and put a proxy with TLS in front of it",
            file=sys.stderr,
        )
    # uvicorn handles these signals and raises them again at its end, where the defaults would make it a failure
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config(service, host, port)).run()


def config(service: Service, host: str, port: int) -> uvicorn.Config:
    """Return the settings of uvicorn."""
    grace = max(1, round(service.settings.grace))
    return uvicorn.Config(
        create_app(service), host, port, log_level="warning", access_log=False, timeout_graceful_shutdown=grace
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
