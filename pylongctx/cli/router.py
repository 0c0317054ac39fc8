"""``pylongctx serve --models``: a server of several models."""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pylongctx._log import LOG
from pylongctx.cli.arguments import FromEnvironment, Options, integer, number

if TYPE_CHECKING:
    from pylongctx.serve.router import Router
    from pylongctx.serve.service import Settings

MAX_MODELS = 4  # loaded at once
FOLDERS = "LLAMA_ARG_MODELS_DIR"
# options that are not passed to the process of a model, with and without a value
OWN = (
    *("--models", "--models-dir", "--models-max", "--models-memory", "--slot-save-path"),
    *("--api-key", "--api-key-file", "--path", "--api-prefix", "--ssl-cert-file", "--ssl-key-file"),
)
OWN_SWITCHES = ("--models-autoload", "--no-models-autoload", "--reuse-port")


def add_router_options(options: Options) -> None:
    """Add the models to serve and the limits on loaded ones."""
    add = options.add
    help = f"serve several models: folders, files or names; requests choose one by name (none) [{FOLDERS}]"
    options.several("--models", "--models-dir", metavar="FOLDER", help=help)
    help, env = f"maximum models loaded at once, 0 for no limit ({MAX_MODELS})", "LLAMA_ARG_MODELS_MAX"
    add("--models-max", parse=integer, env=env, help=help)
    add("--models-memory", parse=number, metavar="GIB", help="maximum GiB of all loaded models (no limit)")
    off, env = ("--no-models-autoload",), "LLAMA_ARG_MODELS_AUTOLOAD"
    help = "load the model named by a request; off: only POST /models/load loads models (on)"
    options.switch("--models-autoload", off=off, env=env, help=help, dest="autoload")
    add("--socket", parse=integer, help=argparse.SUPPRESS)  # for the process of one model


def model_words(args: argparse.Namespace) -> list[str]:
    """Return the folders, files and names of several models; none for a server of one.

    Raises
    ------
    ValueError
        When a single model is given as well.
    """
    if args.socket is not None:
        return []
    named = {"a model": args.positional_model or args.model, "--alias": args.alias}
    given = {name: value for name, value in named.items() if value and not isinstance(value, FromEnvironment)}
    if args.models and given:
        name, value = next(iter(given.items()))
        raise ValueError(f"--models cannot be combined with {name}, here {value!r}: list all models in --models")
    words = args.models or ([] if given else [os.environ.get(FOLDERS, "")])
    return [word for several in words for word in several.split(",") if word]


def run_router(args: argparse.Namespace, words: list[str], settings: "Settings", address: tuple[str, int, bool]) -> int:
    """Serve several models until Ctrl-C or SIGTERM, each in its own process."""
    from pylongctx.serve.children import Children, Limits, Shelf
    from pylongctx.serve.router import Router

    shelf = Shelf(words)
    most = MAX_MODELS if args.models_max is None else args.models_max
    limits = Limits(most, round((args.models_memory or 0) * (1 << 30)), settings.grace)
    children = Children(child_words(args.argv), limits, settings.api_keys, settings.slot_folder)
    LOG.info("models: %s", ", ".join(shelf.sources()))
    return _run(Router(shelf, children, settings, args.autoload is not False), address)


def run_supervised(args: argparse.Namespace, path: str, settings: "Settings", address: tuple[str, int, bool]) -> int:
    """Serve a model in a process that is restarted when it exits, such as after the loss of an RPC server."""
    from pylongctx.serve.children import Children, Limits, OneModel
    from pylongctx.serve.router import Router

    words = child_words(args.argv, "-m", "--model", "-a", "--alias")
    if args.positional_model:
        words.remove(args.positional_model)
    children = Children(words, Limits(grace=settings.grace), settings.api_keys, settings.slot_folder)
    return _run(Router(OneModel(settings.alias, path), children, settings, loads_first=True), address)


def _run(router: "Router", address: tuple[str, int, bool]) -> int:
    from pylongctx.serve.router import create_app
    from pylongctx.serve.server import announce, expect_signals, listen, make_server

    with listen(*address) as listener:
        announce(listener, router.settings)
        expect_signals()
        make_server(create_app(router), router.settings).run([listener])
    return 0


def child_words(argv: Sequence[str], *more: str) -> list[str]:
    """Return the options of a command line that apply to every model; ``more`` are left out too."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in (*OWN, *more):
        parser.add_argument(name)
    for name in OWN_SWITCHES:
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(argv)[1][1:]  # without the name of the command
