"""``pylongctx serve``: an OpenAI-compatible server for one model."""

import argparse
import ipaddress
import math
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pylongctx._log import LOG
from pylongctx.cli.arguments import FromEnvironment, Options, file_text, integer, number, one_of
from pylongctx.cli.default_model import CHAT_TOKENS, choose_model
from pylongctx.cli.generation import add_sampling_options, add_template_options, sampling_arguments, template_arguments
from pylongctx.cli.options import add_foreign_options, add_llama_options, advised_sampling, model_path, open_model
from pylongctx.cli.presets import presets

if TYPE_CHECKING:
    from pylongctx.chat.template import Templates
    from pylongctx.llama import Llama
    from pylongctx.planning import Device
    from pylongctx.serve.router import Router
    from pylongctx.serve.service import Settings


HOSTS = "LLAMA_ARG_HOST"
HOST, PORT, PARALLEL = "127.0.0.1", 8080, 4
EPILOG = f"Clients: OpenAI(base_url='http://{HOST}:{PORT}/v1', api_key='none'), or a browser at http://{HOST}:{PORT}/."
KEY = "LLAMA_API_KEY"
FORMATS = ("auto", "deepseek", "none")  # of reasoning
POLICIES = ("warn", "ignore", "refuse")  # for fields that have no effect
CONTENT = ("note", "refuse")  # pictures and other content that cannot be read
Address = tuple[list[str], int, bool]
POOLINGS = ("none", "mean", "cls", "last", "rank")  # with llama.cpp's numbers
NOT_FOR_EMBEDDING = (
    *("method", "overflow", "cache_reuse", "kv_limit", "kv_store", "kv_store_limit", "kv_store_words", "kv_offload"),
    *("kv_offload_mib", "kv_offload_path", "progress_callback", "draft_model"),
)


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("serve", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    options = Options(parser, "server")
    _add_address(options)
    _add_access(options)
    _add_limits(options)
    _add_embeddings(options)
    _add_routes(options)
    _add_answers(options)
    add_web_options(options)
    add_foreign_options(options, server=True)
    add_llama_options(parser)
    add_template_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def _add_address(options: Options) -> None:
    """Add where the server listens, and what it serves there."""
    add = options.add
    help = f"addresses to listen on, or the path of a Unix socket that ends with .sock ({HOST}: this machine only)"
    options.several("--host", metavar="IP", env=HOSTS, help=help)
    add("--port", parse=integer, env=True, help=f"port ({PORT})")
    add_router_options(options)
    add("-np", "--parallel", parse=integer, env="LLAMA_ARG_N_PARALLEL", help=f"sequences of -c tokens ({PARALLEL})")
    add("--tags", metavar="A,B", env=True, help="tags of the model, for /v1/models (none)")


def _add_access(options: Options) -> None:
    """Add who may send requests."""
    options.several("--api-key", metavar="KEY", help=f"API key; cached prefixes are not shared between keys [{KEY}]")
    help = "API keys from a file, one per line; without a key in it the server does not start"
    options.add("--api-key-file", parse=file_text, metavar="FILE", env=True, help=help)
    options.several("--allowed-hosts", metavar="NAME", help="accepted Host names, * for any (localhost, addresses)")
    help = "web pages that may send requests; localhost: pages of this machine, *: all (none)"
    options.several("--cors-origin", "--cors-origins", metavar="URL", help=help)


def _add_limits(options: Options) -> None:
    """Add limits of requests, memory and time."""
    add = options.add
    add("--queue", parse=integer, help="maximum requests waiting for a sequence (64)")
    add("--max-body", parse=integer, metavar="MIB", help="maximum request size in MiB (64)")
    add("--document-cache", parse=integer, metavar="MIB", help="maximum MiB of prefilled documents (2048)")
    help = "maximum MiB of sequences that lost their slots; 0: none, -1: no limit (8192, or a quarter of free memory)"
    add("-cram", "--cache-ram", parse=cache_ram, metavar="MIB", env=True, help=help)
    help = "minimum tokens after a gap, such as turns that a client left out, that are reused; 0: exact answers (0)"
    add("--cache-reuse", parse=integer, metavar="N", env=True, help=help)
    help = "unsupported fields: name them in a header and the log, or refuse the request (warn)"
    add("--unknown-fields", parse=one_of(POLICIES), metavar="warn|ignore|refuse", help=help)
    help = "pictures, files and unknown parts in turns before the last: put a note in their place, or refuse (note)"
    add("--unknown-content", parse=one_of(CONTENT), metavar="note|refuse", help=help)
    add("--stall", parse=number, metavar="SECONDS", help="time without progress after which /health fails (120)")
    help = "longest step while answers are generated during a prefill; 0: no limit (150)"
    add("--step-ms", parse=number, metavar="MS", help=help)
    add("--slot-save-path", metavar="FOLDER", env=True, help="folder where /slots saves sequences (none)")
    help = "time for running requests to finish when the server stops (10)"
    add("--grace", parse=number, metavar="SECONDS", help=help)
    help = "keep a stream with X-Conversation-Id that nobody reads for so long, to be read again; 0: keep none (300)"
    add("--rejoin-seconds", parse=number, metavar="SECONDS", help=help)
    help = "free a model that no request uses for so long; the next one loads it again; -1: never (-1)"
    add("--sleep-idle-seconds", parse=idle_seconds, metavar="SECONDS", help=help)


def _add_embeddings(options: Options) -> None:
    """Add embeddings and reranking."""
    env = "LLAMA_ARG_EMBEDDINGS"
    options.switch("--embedding", "--embeddings", env=env, help="also serve /v1/embeddings", dest="embeddings")
    env, help = "LLAMA_ARG_RERANKING", "also serve /v1/rerank, for models with a classification head"
    options.switch("--rerank", "--reranking", env=env, help=help, dest="reranking")
    help = "pooling of embeddings (the model's)"
    options.add("--pooling", parse=one_of(POOLINGS[1:]), metavar="KIND", env=True, help=help)


def _add_routes(options: Options) -> None:
    """Add what single routes do."""
    env = "LLAMA_ARG_ENDPOINT_SLOTS"
    options.switch("--slots", off=True, env=env, help="show the state of sequences at /slots (on)")
    options.switch("--spm-infill", help="put the suffix before the prefix in /infill (off)")
    off = ("--no-ui", "--no-webui")
    options.switch("--ui", "--webui", off=off, env=True, help="serve the chat page (on)", dest="page")


def _add_answers(options: Options) -> None:
    """Add how requests are answered."""
    switch = options.switch
    help = "reuse cached prefixes of earlier requests, unless a request says otherwise (on)"
    switch("--cache-prompt", off=True, env=True, help=help)
    switch("--prefill-assistant", off=True, env=True, help="continue a last message of the assistant (on)")
    env, help = "LLAMA_ARG_THINK", "reasoning: in a separate field (auto, deepseek), or part of the answer (none)"
    options.add("--reasoning-format", parse=one_of(FORMATS), metavar="|".join(FORMATS), env=env, help=help)
    switch("--stop-in-reasoning", help="let stop strings act on reasoning and calls too, as in llama.cpp (off)")
    env, help = "LLAMA_ARG_THINK_BUDGET", "maximum tokens of reasoning, then its end tag follows; -1: no limit (-1)"
    options.add("--reasoning-budget", parse=reasoning_budget, env=env, help=help)
    switch("--penalize-prompt", help="let penalties count the tokens of the prompt too, as in llama.cpp (off)")
    switch("-e", "--escape", off=True, help="process escapes such as \\n in options (on)")


def idle_seconds(text: str) -> float:
    """Return a time above 0, infinite for -1."""
    seconds = number(text)
    if seconds != -1 and not seconds > 0:
        raise ValueError(f"{seconds:g} seconds: the time must be above 0, or -1 for never")
    return math.inf if seconds == -1 else seconds


def cache_ram(text: str) -> int:
    """Return a number of MiB in bytes; -1 is no limit."""
    n = integer(text)
    if n < -1:
        raise ValueError(f"{n} MiB: the number must be 0 or more, or -1 for no limit")
    return sys.maxsize if n == -1 else n << 20


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until Ctrl-C or SIGTERM."""
    try:
        from pylongctx.parallel import Host
        from pylongctx.serve.server import announce, inherited, listening, serve, share_heaps
        from pylongctx.serve.service import Service
    except ModuleNotFoundError as reason:
        raise ImportError(f"the server needs more packages ({reason}): pip install 'pylongctx[server]'") from reason

    share_heaps()
    if serves_several(args):
        return run_router(args, model_words(args), settings(args), address(args))
    choose_model(args, CHAT_TOKENS, LOG.info)
    if args.socket is None and (args.rpc or idle_of(args) < math.inf):
        return run_supervised(args, model_path(args), settings(args), address(args))
    wanted = settings(args)
    with listening(*address(args)) if args.socket is None else inherited(args.socket) as listeners:
        vectors = embedder(args) if args.embeddings or args.reranking else None
        n_seq = PARALLEL if args.parallel is None else args.parallel
        host = open_model(args, partial(Host, n_seq=n_seq), n_seq=n_seq)
        host.templates.reasoning_format = args.reasoning_format
        host.templates.stops_reasoning = bool(args.stop_in_reasoning)
        limit_reasoning(host.templates, args.reasoning_budget)
        host.penalizes_prompt = bool(args.penalize_prompt)
        service = Service(host, wanted, vectors)
        if host.session.context.why:
            LOG.info(host.session.context.why)
        if args.socket is None:
            announce(listeners, wanted)
        return serve(service, listeners)


def reasoning_budget(text: str) -> int:
    """Return a number of tokens, -1 for no limit."""
    n = integer(text)
    if n < -1:
        raise ValueError(f"{n} tokens: the number must be 0 or more, or -1 for no limit")
    return n


def limit_reasoning(templates: "Templates", n: int | None) -> None:
    """Limit the reasoning of all answers; the log says when the template marks none."""
    if n is None or n == -1:
        return
    templates.reasoning_budget = n
    if templates.template.reasoning_tags is None:
        LOG.warning("--reasoning-budget %d has no effect: the chat template does not mark reasoning", n)


def idle_of(args: argparse.Namespace) -> float:
    """Return the seconds without a request after which a model is freed."""
    return math.inf if args.sleep_idle_seconds is None else float(args.sleep_idle_seconds)


def address(args: argparse.Namespace) -> Address:
    """Return the hosts and the port to listen on, and whether other servers may share the port."""
    if args.port is not None and not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port must be from 0 to {(1 << 16) - 1}, not {args.port}; 0 takes a free one")
    from pylongctx.serve.server import is_path

    hosts = hosts_of(args)
    if args.reuse_port and (paths := [host for host in hosts if is_path(host)]):
        raise ValueError(f"--reuse-port shares a port, but {paths[0]} is a Unix socket: leave one of them out")
    return hosts, PORT if args.port is None else args.port, bool(args.reuse_port)


def hosts_of(args: argparse.Namespace) -> list[str]:
    """Return the hosts to listen on."""
    return _words(",".join(args.host or [os.environ.get(HOSTS, "")])) or [HOST]


def settings(args: argparse.Namespace) -> "Settings":
    """Return the settings of the service; missing options keep its defaults."""
    from pylongctx.serve.service import Settings

    sampling, template = advised_sampling(args) | sampling_arguments(args), template_arguments(args)
    most = args.max_body and args.max_body << 20
    given: dict[str, Any] = {"n_queue": args.queue, "n_body": most, "grace": args.grace, "stall": args.stall}
    if args.rejoin_seconds is not None and not 0 <= args.rejoin_seconds < math.inf:
        raise ValueError(f"--rejoin-seconds must be 0 (none are kept) or more, not {args.rejoin_seconds:g}")
    given["rejoin"] = args.rejoin_seconds
    if args.step_ms is not None and args.step_ms < 0:
        raise ValueError(f"--step-ms must be 0 (no limit) or more, not {args.step_ms:g}")
    given["step"] = None if args.step_ms is None else args.step_ms / 1000
    given |= {"page": args.page, "slots": args.slots, "unknown_fields": args.unknown_fields}
    given["unknown_content"] = args.unknown_content
    given |= {"spm_infill": args.spm_infill, "cache_prompt": args.cache_prompt, "prefills": args.prefill_assistant}
    given["document_bytes"] = None if args.document_cache is None else args.document_cache << 20
    limit = sampling.pop("max_tokens")
    alias, *aliases = _words(args.alias) or [Path(model_path(args)).stem]
    return Settings(
        alias=alias,
        aliases=tuple(aliases),
        tags=tuple(_words(args.tags)),
        api_keys=api_keys(args),
        hosts=(*(args.allowed_hosts or ()), *hosts_of(args)),
        slot_folder=Path(args.slot_save_path) if args.slot_save_path else None,
        parked_bytes=args.cache_ram,
        cors_origins=tuple(one for word in args.cors_origin or () for one in word.split(",")),
        n_predict=limit if limit and limit > 0 else None,
        sampling=sampling,
        template=template,
        **{name: value for name, value in given.items() if value is not None},
        **web_settings(args),
    )


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys that requests need; empty if none was asked for.

    ValueError when an option or the variable holds no key: the server would be open without anyone knowing.
    """
    given = [("--api-key", word, ",") for word in args.api_key or ()]
    if args.api_key_file is not None:
        given.append(("the file of --api-key-file", args.api_key_file, "\n"))
    if KEY in os.environ and not args.api_key and args.socket is None:  # a router gives its keys in a file
        given.append((f"the environment variable {KEY}", os.environ[KEY], ","))
    found: list[str] = []
    for name, text, end in given:
        keys = [key for part in text.split(end) if (key := part.strip()) and not key.startswith("#")]
        if not keys:
            raise ValueError(f"{name} holds no API key, so anyone could use the server: give it a key, or leave it out")
        found += keys
    return tuple(dict.fromkeys(found))


def _words(text: str | None) -> list[str]:
    """Return the words between commas without duplicates."""
    return list(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def embedder(args: argparse.Namespace) -> "Llama":
    """Return the model opened for embeddings."""
    from pylongctx.completions.embeddings import NO_POOLING, RANK
    from pylongctx.llama import Llama

    if args.reranking and args.pooling not in (None, POOLINGS[RANK]):
        raise ValueError(f"--reranking needs --pooling rank, not {args.pooling}: leave one of them out")

    def make(path: str, **arguments: Any) -> Llama:
        wanted = POOLINGS[RANK] if args.reranking else args.pooling
        pooling = -1 if wanted is None else POOLINGS.index(wanted)
        given = {name: value for name, value in arguments.items() if name not in NOT_FOR_EMBEDDING}
        return Llama(path, embedding=True, pooling_type=pooling, **given)

    llm = open_model(args, make, n_seq=0)
    if llm.pooling_type() == NO_POOLING:
        llm.close()
        raise ValueError("the model does not define a pooling for embeddings: choose --pooling mean, cls or last")
    return llm


# ---- several models ----

MAX_MODELS = 4  # loaded at once
FOLDERS = "LLAMA_ARG_MODELS_DIR"
# options that are not passed to the process of a model, with and without a value
OWN = (
    *("--models", "--models-dir", "--models-max", "--models-memory", "--slot-save-path"),
    *("--api-key", "--api-key-file", "--path", "--api-prefix", "--ssl-cert-file", "--ssl-key-file"),
    *("--models-preset", "--sleep-idle-seconds"),
)
# nor are these options of a preset: they are the server's, or have no meaning for one model
OF_SERVER = ("--host", "--port", "--alias", "--socket", "--grace", "--timeout", "--help", "--help-all")
OWN_SWITCHES = ("--models-autoload", "--no-models-autoload", "--reuse-port")


def add_router_options(options: Options) -> None:
    """Add the models to serve and the limits on loaded ones."""
    add = options.add
    help = "serve several models: folders, files or names; requests choose one by name (none)"
    options.several("--models", "--models-dir", metavar="FOLDER", env=FOLDERS, help=help)
    help = "INI file with options per model: [NAME], or [*] for all models, then lines OPTION = VALUE (none)"
    add("--models-preset", metavar="FILE", env=True, help=help)
    add("--models-max", parse=integer, env=True, help=f"maximum models loaded at once, 0 for no limit ({MAX_MODELS})")
    add("--models-memory", parse=number, metavar="GIB", help="maximum GiB of all loaded models (no limit)")
    help = "load the model named by a request; off: only POST /models/load loads models (on)"
    options.switch("--models-autoload", off=True, env=True, help=help, dest="autoload")
    add("--socket", parse=integer, help=argparse.SUPPRESS)  # for the process of one model


def serves_several(args: argparse.Namespace) -> bool:
    """Return True for a server of several models."""
    return args.socket is None and bool(model_words(args) or preset_file(args))


def model_words(args: argparse.Namespace) -> list[str]:
    """Return the folders, files and names of several models, without those of presets."""
    if args.socket is not None:
        return []
    given = _only_model(args)
    if args.models and given:
        raise ValueError(f"--models cannot be combined with {given}: list all models in --models")
    words = args.models or ([] if given else [os.environ.get(FOLDERS, "")])
    return [word for several in words for word in several.split(",") if word]


def preset_file(args: argparse.Namespace) -> str | None:
    """Return the file of options per model; None without one, or if only its variable is set for a server of one."""
    given, path = _only_model(args), args.models_preset
    if given and path is not None and not isinstance(path, FromEnvironment):
        raise ValueError(f"--models-preset cannot be combined with {given}: the file names all models")
    return None if given or path is None else str(path)


def _only_model(args: argparse.Namespace) -> str:
    """Return what names the model of a server of one, for messages; empty if nothing does."""
    named = {"a model": args.positional_model or args.model, "--alias": args.alias}
    given = [(name, value) for name, value in named.items() if value and not isinstance(value, FromEnvironment)]
    return f"{given[0][0]}, here {given[0][1]!r}" if given else ""


def run_router(args: argparse.Namespace, words: list[str], settings: "Settings", address: Address) -> int:
    """Serve several models until Ctrl-C or SIGTERM, each in its own process."""
    from pylongctx.serve.children import Children, Limits, Shelf
    from pylongctx.serve.router import Router

    chosen = presets(args, preset_file(args), (*OWN, *OWN_SWITCHES, *OF_SERVER))
    shelf = Shelf(words, chosen.models)
    chosen.check(shelf.sources())
    most = MAX_MODELS if args.models_max is None else args.models_max
    limits = Limits(most, round((args.models_memory or 0) * (1 << 30)), settings.grace, idle_of(args))
    words = child_words(args.argv)
    children = Children(words, limits, settings.api_keys, settings.slot_folder, chosen.words)
    LOG.info("models: %s", ", ".join(shelf.sources()))
    autoload = args.autoload is not False
    first = [name for name in shelf.sources() if autoload and chosen.loads(name)]
    return _run(Router(shelf, children, settings, autoload, first), address)


def run_supervised(args: argparse.Namespace, path: str, settings: "Settings", address: Address) -> int:
    """Serve a model in a process that is started again when it is needed: after it was idle, or lost an RPC server."""
    from pylongctx.serve.children import Children, Limits, OneModel
    from pylongctx.serve.router import Router

    words = child_words(args.argv, "-m", "--model", "-a", "--alias")
    if args.positional_model:
        words.remove(args.positional_model)
    limits = Limits(grace=settings.grace, idle=idle_of(args))
    children = Children(words, limits, settings.api_keys, settings.slot_folder)
    return _run(Router(OneModel(settings.alias, path), children, settings, first=[settings.alias]), address)


def _run(router: "Router", address: Address) -> int:
    from pylongctx.serve.router import create_app
    from pylongctx.serve.server import announce, expect_signals, listening, make_server

    with listening(*address) as listeners:
        announce(listeners, router.settings)
        expect_signals()
        make_server(create_app(router), router.settings).run(listeners)
    return 0


def child_words(argv: Sequence[str], *more: str) -> list[str]:
    """Return the options of a command line that apply to every model; ``more`` are left out too."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in (*OWN, *more):
        parser.add_argument(name)
    for name in OWN_SWITCHES:
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(argv)[1][1:]  # without the name of the command


# ---- addresses, pages and connections ----


def add_web_options(options: Options) -> None:
    """Add the options, see ``web_settings``."""
    add = options.add
    help = "serve the files of a folder instead of the chat page; they need no key (none)"
    add("--path", metavar="FOLDER", env="LLAMA_ARG_STATIC_PATH", help=help)
    add("--api-prefix", metavar="PREFIX", env=True, help="prefix of all paths, such as /llm (none)")
    add("--ssl-cert-file", metavar="FILE", env=True, help="TLS certificate, a PEM file (none: http)")
    add("--ssl-key-file", metavar="FILE", env=True, help="private key of the certificate, a PEM file")
    options.switch("--reuse-port", env=True, help="let several servers listen on one port (off)")
    help = "time to receive the body of a request, plus 1 s for every 64 KiB (30)"
    add("-to", "--timeout", parse=number, metavar="SECONDS", env=True, help=help)
    help = "idle time after which a stream sends a comment; -1: never (10)"
    add("--sse-ping-interval", parse=integer, metavar="SECONDS", env=True, help=help)


def web_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``Settings`` that were given."""
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


# ---- the command rpc-server ----

RPC_ABOUT = "``pylongctx rpc-server``: let a model on another machine use the memory and processors of this one."
RPC_EPILOG = """On the other machine: Llama(..., rpc_servers="HOST:PORT", n_gpu_layers=-1), or --rpc HOST:PORT -ngl -1.
One client at a time. No authentication, no encryption: anyone who can connect can read and crash this process."""


def add_rpc_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("rpc-server", description=RPC_ABOUT, epilog=RPC_EPILOG)
    add = parser.add_argument
    add("-H", "--host", default="127.0.0.1", metavar="IP", help="IPv4 address to listen on (127.0.0.1: this machine)")
    add("-p", "--port", type=int, default=50052, metavar="N", help="port (50052)")
    add("-d", "--device", default="", metavar="NAME,...", help="devices to share (the GPUs, or the CPU)")
    add("-t", "--threads", type=int, metavar="N", help="threads of the CPU (the physical cores)")
    add("--list-devices", action="store_true", help="print the devices and exit")
    parser.set_defaults(run=run_rpc_server)


def run_rpc_server(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from pylongctx.planning import devices, serve_devices

    if args.list_devices:
        print("\n".join(map(_device_line, devices())))
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


def _device_line(device: "Device") -> str:
    return f"{device.name}: {device.description} ({device.type}, {device.memory})"
