"""``pylongctx rpc-server``: let a model on another machine use the memory and processors of this one."""

import argparse
import ipaddress
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pylongctx.planning import Device

EPILOG = """On the other machine: Llama(..., rpc_servers="HOST:PORT", n_gpu_layers=-1), or --rpc HOST:PORT -ngl -1.
One client at a time. No authentication, no encryption: anyone who can connect can read and crash this process."""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("rpc-server", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("-H", "--host", default="127.0.0.1", metavar="IP", help="IPv4 address to listen on (127.0.0.1: this machine)")
    add("-p", "--port", type=int, default=50052, metavar="N", help="port (50052)")
    add("-d", "--device", default="", metavar="NAME,...", help="devices to share (the GPUs, or the CPU)")
    add("-t", "--threads", type=int, metavar="N", help="threads of the CPU (the physical cores)")
    add("--list-devices", action="store_true", help="print the devices and exit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from pylongctx.planning import devices, serve_devices

    if args.list_devices:
        print("\n".join(map(_line, devices())))
        return 0
    if not is_loopback(args.host):
        print(
            f"pylongctx: warning: anyone who reaches {args.host}:{args.port} can use, read and crash this process; "
            "never do this on an untrusted network",
            file=sys.stderr,
        )
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the library never returns to Python, whose handler would not run
    serve_devices(args.host, args.port, args.device, args.threads)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can connect; ValueError when it is not an IPv4 address."""
    return ipaddress.IPv4Address(host).is_loopback


def _line(device: "Device") -> str:
    return f"{device.name}: {device.description} ({device.type}, {device.memory})"
