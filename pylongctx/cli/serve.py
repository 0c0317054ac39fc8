"""``pylongctx serve``: an OpenAI-compatible server for one model."""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pylongctx._log import LOG
from pylongctx.cli.arguments import Options, file_text, integer, number, one_of
from pylongctx.cli.options import add_llama_options, advised_sampling, model_path, open_model
from pylongctx.cli.refused import refuse_server_options
from pylongctx.cli.router import add_router_options, model_words, run_router, run_supervised
from pylongctx.cli.sampling import add_sampling_options, add_template_options, sampling_arguments, template_arguments
from pylongctx.cli.web import add_web_options, web_settings

if TYPE_CHECKING:
    from pylongctx.llama import Llama
    from pylongctx.serve.service import Settings

HOST, PORT, PARALLEL = "127.0.0.1", 8080, 4
EPILOG = f"Clients: OpenAI(base_url='http://{HOST}:{PORT}/v1', api_key='none'), or a browser at http://{HOST}:{PORT}/."
KEY = "LLAMA_API_KEY"
FORMATS = ("auto", "deepseek", "none")  # of reasoning
POLICIES = ("warn", "ignore", "refuse")  # for fields that have no effect
POOLINGS = ("none", "mean", "cls", "last", "rank")  # with llama.cpp's numbers
NOT_FOR_EMBEDDING = (
    "method",
    "overflow",
    "kv_limit",
    "kv_store",
    "kv_store_limit",
    "kv_store_words",
    "kv_offload",
    "kv_offload_mib",
    "progress_callback",
    "draft_model",
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
    refuse_server_options(options)
    add_llama_options(parser)
    add_template_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def _add_address(options: Options) -> None:
    """Add where the server listens, and what it serves there."""
    add = options.add
    add("--host", metavar="IP", env="LLAMA_ARG_HOST", help=f"address to listen on ({HOST}: this machine only)")
    add("--port", parse=integer, env="LLAMA_ARG_PORT", help=f"port ({PORT})")
    add_router_options(options)
    add("-np", "--parallel", parse=integer, env="LLAMA_ARG_N_PARALLEL", help=f"sequences of -c tokens ({PARALLEL})")
    add("--tags", metavar="A,B", env="LLAMA_ARG_TAGS", help="tags of the model, for /v1/models (none)")


def _add_access(options: Options) -> None:
    """Add who may send requests."""
    options.several("--api-key", metavar="KEY", help=f"API key; cached prefixes are not shared between keys [{KEY}]")
    options.add("--api-key-file", parse=file_text, metavar="FILE", help="API keys from a file, one per line")
    options.several("--allowed-hosts", metavar="NAME", help="accepted Host names, * for any (localhost, addresses)")
    help = "web pages that may send requests; localhost: pages of this machine, *: all (none)"
    options.several("--cors-origin", "--cors-origins", metavar="URL", help=help)


def _add_limits(options: Options) -> None:
    """Add limits of requests, memory and time."""
    add = options.add
    add("--queue", parse=integer, help="maximum requests waiting for a sequence (64)")
    add("--max-body", parse=integer, metavar="MIB", help="maximum request size in MiB (64)")
    add("--document-cache", parse=integer, metavar="MIB", help="maximum MiB of prefilled documents (2048)")
    help = "unsupported fields: name them in a header and the log, or refuse the request (warn)"
    add("--unknown-fields", parse=one_of(POLICIES), metavar="warn|ignore|refuse", help=help)
    add("--stall", parse=number, metavar="SECONDS", help="time without progress after which /health fails (120)")
    help = "longest step while answers are generated during a prefill; 0: no limit (150)"
    add("--step-ms", parse=number, metavar="MS", help=help)
    env = "LLAMA_ARG_SLOT_SAVE_PATH"
    add("--slot-save-path", metavar="FOLDER", env=env, help="folder where /slots saves sequences (none)")
    help = "time for running requests to finish when the server stops (10)"
    add("--grace", parse=number, metavar="SECONDS", help=help)


def _add_embeddings(options: Options) -> None:
    """Add embeddings and reranking."""
    env = "LLAMA_ARG_EMBEDDINGS"
    options.switch("--embedding", "--embeddings", env=env, help="also serve /v1/embeddings", dest="embeddings")
    env, help = "LLAMA_ARG_RERANKING", "also serve /v1/rerank, for models with a classification head"
    options.switch("--rerank", "--reranking", env=env, help=help, dest="reranking")
    env, help = "LLAMA_ARG_POOLING", "pooling of embeddings (the model's)"
    options.add("--pooling", parse=one_of(POOLINGS[1:]), metavar="KIND", env=env, help=help)


def _add_routes(options: Options) -> None:
    """Add what single routes do."""
    env = "LLAMA_ARG_ENDPOINT_SLOTS"
    options.switch("--slots", off=("--no-slots",), env=env, help="show the state of sequences at /slots (on)")
    help = "put the suffix before the prefix in /infill (off)"
    options.switch("--spm-infill", help=help, dest="spm_infill")
    off = ("--no-ui", "--no-webui")
    options.switch("--ui", "--webui", off=off, env="LLAMA_ARG_UI", help="serve the chat page (on)", dest="page")


def _add_answers(options: Options) -> None:
    """Add how requests are answered."""
    switch = options.switch
    env, off = "LLAMA_ARG_CACHE_PROMPT", ("--no-cache-prompt",)
    help = "reuse cached prefixes of earlier requests, unless a request says otherwise (on)"
    switch("--cache-prompt", off=off, env=env, help=help, dest="cache_prompt")
    env, help = "LLAMA_ARG_PREFILL_ASSISTANT", "continue a last message of the assistant (on)"
    switch("--prefill-assistant", off=("--no-prefill-assistant",), env=env, help=help, dest="prefill_assistant")
    env, help = "LLAMA_ARG_THINK", "reasoning: in a separate field (auto, deepseek), or part of the answer (none)"
    options.add("--reasoning-format", parse=one_of(FORMATS), metavar="|".join(FORMATS), env=env, help=help)
    switch("-e", "--escape", off=("--no-escape",), help="process escapes such as \\n in options (on)", dest="escape")


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until Ctrl-C or SIGTERM."""
    try:
        from pylongctx.parallel import Host
        from pylongctx.serve.server import announce, inherited, listen, serve, share_heaps
        from pylongctx.serve.service import Service
    except ModuleNotFoundError as reason:
        raise ImportError(f"the server needs more packages ({reason}): pip install pylongctx[server]") from reason

    share_heaps()
    if folders := model_words(args):
        return run_router(args, folders, settings(args), address(args))
    if args.rpc and args.socket is None:
        return run_supervised(args, model_path(args), settings(args), address(args))
    wanted = settings(args)
    with listen(*address(args)) if args.socket is None else inherited(args.socket) as listener:
        vectors = embedder(args) if args.embeddings or args.reranking else None
        n_seq = PARALLEL if args.parallel is None else args.parallel
        host = open_model(args, partial(Host, n_seq=n_seq), n_seq=n_seq)
        host.templates.reasoning_format = args.reasoning_format
        service = Service(host, wanted, vectors)
        if host.session.context.why:
            LOG.info(host.session.context.why)
        if args.socket is None:
            announce(listener, wanted)
        return serve(service, listener)


def address(args: argparse.Namespace) -> tuple[str, int, bool]:
    """Return the host and port to listen on, and whether other servers may share the port."""
    if args.port is not None and not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port must be from 0 to {(1 << 16) - 1}, not {args.port}; 0 takes a free one")
    return args.host or HOST, PORT if args.port is None else args.port, bool(args.reuse_port)


def settings(args: argparse.Namespace) -> "Settings":
    """Return the settings of the service; missing options keep its defaults."""
    from pylongctx.serve.service import Settings

    sampling, template = advised_sampling(args) | sampling_arguments(args), template_arguments(args)
    words = args.api_key or [os.environ.get(KEY, "")]
    keys = [*(key for word in words for key in word.split(",")), *(args.api_key_file or "").splitlines()]
    most = args.max_body and args.max_body << 20
    given: dict[str, Any] = {"n_queue": args.queue, "n_body": most, "grace": args.grace, "stall": args.stall}
    if args.step_ms is not None and args.step_ms < 0:
        raise ValueError(f"--step-ms must be 0 (no limit) or more, not {args.step_ms:g}")
    given["step"] = None if args.step_ms is None else args.step_ms / 1000
    given |= {"page": args.page, "slots": args.slots, "unknown_fields": args.unknown_fields}
    given |= {"spm_infill": args.spm_infill, "cache_prompt": args.cache_prompt, "prefills": args.prefill_assistant}
    given["document_bytes"] = None if args.document_cache is None else args.document_cache << 20
    limit = sampling.pop("max_tokens")
    alias, *aliases = _words(args.alias) or [Path(model_path(args)).stem]
    return Settings(
        alias=alias,
        aliases=tuple(aliases),
        tags=tuple(_words(args.tags)),
        api_keys=tuple(dict.fromkeys(key for key in keys if key and not key.startswith("#"))),
        hosts=(*(args.allowed_hosts or ()), args.host or HOST),
        slot_folder=Path(args.slot_save_path) if args.slot_save_path else None,
        cors_origins=tuple(one for word in args.cors_origin or () for one in word.split(",")),
        n_predict=limit if limit and limit > 0 else None,
        sampling=sampling,
        template=template,
        **{name: value for name, value in given.items() if value is not None},
        **web_settings(args),
    )


def _words(text: str | None) -> list[str]:
    """Return the words between commas without duplicates."""
    return list(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def embedder(args: argparse.Namespace) -> "Llama":
    """Return the model opened for embeddings.

    Raises
    ------
    ValueError
        When neither the model nor the options define the pooling, or the model cannot rerank.
    """
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
