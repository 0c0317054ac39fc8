"""Options of ``pylongctx serve`` about addresses, pages and connections, spelled as llama-server spells them."""

import argparse
from pathlib import Path
from typing import Any

from pylongctx.cli.arguments import Options, integer, number


def add_web_options(options: Options) -> None:
    """Add the options, see ``web_settings``."""
    add = options.add
    help = "serve the files of a folder instead of the chat page; they need no key (none)"
    add("--path", metavar="FOLDER", env="LLAMA_ARG_STATIC_PATH", help=help)
    add("--api-prefix", metavar="PREFIX", env="LLAMA_ARG_API_PREFIX", help="prefix of all paths, such as /llm (none)")
    help = "TLS certificate, a PEM file (none: http)"
    add("--ssl-cert-file", metavar="FILE", env="LLAMA_ARG_SSL_CERT_FILE", help=help)
    add(
        "--ssl-key-file",
        metavar="FILE",
        env="LLAMA_ARG_SSL_KEY_FILE",
        help="private key of the certificate, a PEM file",
    )
    options.switch("--reuse-port", env="LLAMA_ARG_REUSE_PORT", help="let several servers listen on one port (off)")
    help = "time to receive the body of a request, plus 1 s for every 64 KiB (30)"
    add("-to", "--timeout", parse=number, metavar="SECONDS", env="LLAMA_ARG_TIMEOUT", help=help)
    help = "idle time after which a stream sends a comment; -1: never (10)"
    add("--sse-ping-interval", parse=integer, metavar="SECONDS", env="LLAMA_ARG_SSE_PING_INTERVAL", help=help)


def web_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``Settings`` that were given.

    Raises
    ------
    ValueError
        When a folder or a file is missing, or a number is out of range.
    """
    given: dict[str, Any] = {}
    if args.timeout is not None:
        given["body_patience"] = _above_0("--timeout", args.timeout)
    if args.sse_ping_interval is not None:
        n = args.sse_ping_interval
        given["patience"] = None if n == -1 else _above_0("--sse-ping-interval", n)
    if args.socket is not None:  # the router of several models handles these options
        return given
    if args.path is not None:
        given["static_folder"] = _folder(args.path)
    if args.api_prefix:
        given["prefix"] = _prefix(args.api_prefix)
    if tls := _tls(args.ssl_cert_file, args.ssl_key_file):
        given["tls"] = tls
    return given


def _above_0(name: str, value: float) -> float:
    if not 0 < value < 2**31:
        raise ValueError(f"{name} must be above 0, not {value:g}")
    return float(value)


def _folder(path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"--path {path} is not a folder")
    return folder


def _prefix(text: str) -> str:
    if not text.startswith("/") or text.endswith("/") or "//" in text or not text.isprintable() or " " in text:
        raise ValueError(f"--api-prefix must begin with / and must not end with /, such as /llm, not {str(text)!r}")
    return str(text)


def _tls(certificate: str | None, key: str | None) -> tuple[str, str] | None:
    if not (certificate or key):
        return None
    if not (certificate and key):
        raise ValueError("TLS needs both --ssl-cert-file and --ssl-key-file")
    for path in (certificate, key):
        if not Path(path).is_file():
            raise ValueError(f"{path} is not a file: --ssl-cert-file and --ssl-key-file take PEM files")
    return str(certificate), str(key)
