"""``pylongctx serve``: an OpenAI-compatible server for one model."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pylongctx.cli.options import add_model_options, llama_arguments, model_path

EPILOG = "Clients: OpenAI(base_url='http://127.0.0.1:8080/v1', api_key='none'), or a browser at http://127.0.0.1:8080/."


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("serve", help="serve a model to OpenAI clients", description=__doc__, epilog=EPILOG)
    add_model_options(parser)
    add = parser.add_argument
    add(
        "-c",
        "--ctx-size",
        type=int,
        default=0,
        metavar="N",
        help="tokens of one sequence (as in Llama)",
    )
    add("--method", default=os.environ.get("LCTX_METHOD", "full"), metavar="M", help="how to read (full)")
    add("-np", "--parallel", type=int, default=4, metavar="N", help="sequences that are decoded together (4)")
    add("-n", "--predict", type=int, metavar="N", help="most tokens of an answer (the context)")
    add("-a", "--alias", metavar="NAME", help="the model's name for clients (that of the file)")
    add("--host", default="127.0.0.1", metavar="IP", help="address to listen on (127.0.0.1: this machine)")
    add("--port", type=int, default=8080, metavar="N", help="port (8080)")
    add("--api-key", default=os.environ.get("LLAMA_API_KEY", ""), metavar="KEY,...", help="keys that clients must send")
    add("--cors-origin", action="append", default=[], metavar="URL", help="let pages of this origin ask (none)")
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait (64)")
    add("--max-body", type=int, default=64, metavar="MIB", help="most MiB of a request (64)")
    add("--grace", type=float, default=10.0, metavar="S", help="seconds for running requests at the end (10)")
    add("--embeddings", action="store_true", help="open the model a second time, for /v1/embeddings")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until Ctrl-C."""
    try:
        from pylongctx.serve.server import run as serve
        from pylongctx.serve.service import Service
    except ImportError as reason:
        raise ImportError(f"the server needs more packages ({reason.name}): pip install pylongctx[server]") from reason
    from pylongctx.serve.host import Host

    host = Host(model_path(args), args.parallel, n_ctx=args.ctx_size, method=args.method, **llama_arguments(args))
    service = Service(host, settings(args), embedder(args))
    print(f"pylongctx: {host.session.context.why}", file=sys.stderr)
    print(f"pylongctx: http://{args.host}:{args.port}", file=sys.stderr, flush=True)
    serve(service, args.host, args.port)
    return 0


def settings(args: argparse.Namespace) -> Any:
    """Return the settings of the service."""
    from pylongctx.serve.service import Settings

    return Settings(
        alias=args.alias or Path(model_path(args)).stem,
        api_keys=tuple(key for key in args.api_key.split(",") if key),
        cors_origins=tuple(args.cors_origin),
        n_queue=args.queue,
        n_predict=args.predict if args.predict and args.predict > 0 else None,
        n_body=args.max_body << 20,
        grace=args.grace,
    )


def embedder(args: argparse.Namespace) -> Any:
    """Return the model opened for embeddings, None when they are not wanted."""
    from pylongctx.llama import Llama

    return Llama(model_path(args), embedding=True, **llama_arguments(args)) if args.embeddings else None
