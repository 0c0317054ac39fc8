"""Options of ``pylongctx serve`` about addresses, pages and connections, spelled as llama-server spells them."""

import argparse
from pathlib import Path
from typing import Any

from pylongctx.cli.arguments import Options, integer, number


def add_web_options(options: Options) -> None:
    """Add the options, see ``web_settings``."""
    add = options.add
    help = "serve the files of a folder, in place of the chat page; they need no key (none)"
    add("--path", metavar="FOLDER", env="LLAMA_ARG_STATIC_PATH", help=help)
    add("--api-prefix", metavar="PREFIX", env="LLAMA_ARG_API_PREFIX", help="begins all paths, such as /llm (none)")
    help = "certificate of TLS, a file in PEM (none: http)"
    add("--ssl-cert-file", metavar="FILE", env="LLAMA_ARG_SSL_CERT_FILE", help=help)
    add("--ssl-key-file", metavar="FILE", env="LLAMA_ARG_SSL_KEY_FILE", help="its private key, a file in PEM")
    options.switch("--reuse-port", env="LLAMA_ARG_REUSE_PORT", help="let several servers listen on one port (off)")
    help = "in which the body of a request must come, and 64 KiB more a second (30)"
    add("-to", "--timeout", parse=number, metavar="SECONDS", env="LLAMA_ARG_TIMEOUT", help=help)
    help = "without news after which a stream gets a comment; -1: never (10)"
    add("--sse-ping-interval", parse=integer, metavar="SECONDS", env="LLAMA_ARG_SSE_PING_INTERVAL", help=help)


def web_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``Settings`` that were given.

    Raises
    ------
    ValueError
        When a folder or a file is not there, or a number makes no sense.
    """
    given: dict[str, Any] = {}
    if args.timeout is not None:
        given["body_patience"] = _above_0("--timeout", args.timeout)
    if args.sse_ping_interval is not None:
        n = args.sse_ping_interval
        given["patience"] = None if n == -1 else _above_0("--sse-ping-interval", n)
    if args.socket is not None:  # of a process behind a server of several models, which has these
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
        raise ValueError(f"--path {path} is no folder")
    return folder


def _prefix(text: str) -> str:
    if not text.startswith("/") or text.endswith("/") or "//" in text or not text.isprintable() or " " in text:
        raise ValueError(f"--api-prefix must begin with / and end with none, such as /llm, not {str(text)!r}")
    return str(text)


def _tls(certificate: str | None, key: str | None) -> tuple[str, str] | None:
    if not (certificate or key):
        return None
    if not (certificate and key):
        raise ValueError("TLS needs both --ssl-cert-file and --ssl-key-file")
    for path in (certificate, key):
        if not Path(path).is_file():
            raise ValueError(f"{path} is no file: --ssl-cert-file and --ssl-key-file are files in PEM")
    return str(certificate), str(key)
