"""Options of models that several commands share, spelled as llama.cpp spells them, and the model that they open."""

import argparse
import csv
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from pylongctx import __version__
from pylongctx._enums import AUTO_LAYERS, EVICT_MIDDLE, LOAD_MODES, OVERFLOWS, ROPE_SCALINGS, SPLIT_MODES
from pylongctx._log import LOG
from pylongctx.catalog import find
from pylongctx.cli.arguments import (
    ON,
    FromEnvironment,
    Options,
    flash_attention,
    integer,
    layers,
    mib,
    number,
    offload,
    one,
    one_of,
    rope_scaling,
    shares,
    split_mode,
    switched,
    with_origins,
)
from pylongctx.cli.generation import add_draft_options, draft_model, own_draft
from pylongctx.cli.get import fetched
from pylongctx.methods import NONE, Method, named
from pylongctx.model_files.overrides import EXPERTS, first_layers
from pylongctx.models import embedded_model

if TYPE_CHECKING:
    from pylongctx.llama import Llama


class _Adaptable(Protocol):
    def add_lora(self, path: str, scale: float = 1.0) -> None: ...
    def close(self) -> None: ...


Adaptable = TypeVar("Adaptable", bound=_Adaptable)

# keywords of Llama whose value is that of an option, unchanged
PLAIN = {
    **{"n_ctx": "ctx_size", "n_threads": "threads", "n_threads_batch": "threads_batch", "n_batch": "batch_size"},
    **{"n_ubatch": "ubatch_size", "type_k": "cache_type_k", "type_v": "cache_type_v", "n_gpu_layers": "gpu_layers"},
    **{"rpc_servers": "rpc", "rope_scaling_type": "rope_scaling", "offload_kqv": "kvo"},
    **{
        name: name
        for name in (
            *("tensor_split", "split_mode", "main_gpu", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
            *("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast", "op_offload", "overflow"),
            "cache_reuse",
            *("kv_limit", "kv_store", "kv_store_limit", "kv_store_words", "preflight", "swa_full", "deterministic"),
            *("kv_offload_path", "verbose"),
        )
    },
}
VERBOSE = 4  # llama.cpp's verbosity that -v corresponds to
MODEL = "GGUF file, or a name that pylongctx get lists (the embedded model)"

# ---- options ----


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the model and the context options of passkey and inspect, without environment variables."""
    options = Options(parser, "model and context", environment=False)
    _add_model(parser, options)
    _add_context(options)
    _add_devices(Options(parser, "devices", environment=False))
    add_rope_options(Options(parser, "positions", environment=False))


def add_llama_options(parser: argparse.ArgumentParser, positional: bool = True) -> None:
    """Add all options of the model, its context and its method, see ``open_llama``."""
    options = Options(parser, "model and context")
    _add_model(parser, options, positional)
    add = options.add
    add("-c", "--ctx-size", parse=integer, env=True, help="context size in tokens (the model's)")
    _add_context(options)
    add("-fa", "--flash-attn", parse=flash_attention, metavar="on|auto", env=True, help="flash attention, always on")
    modes = one_of(tuple(LOAD_MODES))
    add("-lm", "--load-mode", parse=modes, metavar="MODE", env=True, help=f"{', '.join(LOAD_MODES)}")
    options.switch("--mmap", off=True, env=True, help="memory-map the file, same as --load-mode mmap (on)")
    options.switch("--mlock", env=True, help="lock the model in memory, same as --load-mode mmap+mlock (off)")
    help = "override metadata of the file; TYPE is int, float, bool or str"
    options.several("--override-kv", parse=_pairs, metavar="KEY=TYPE:VALUE,...", help=help)
    options.several("--lora", metavar="FILE,...", help="LoRA adapters")
    options.several("--lora-scaled", metavar="FILE:SCALE,...", help="LoRA adapters and their scales")
    help = "the model's name in answers (its file name); serve takes several, separated by commas"
    add("-a", "--alias", metavar="NAME", env=True, help=help)
    options.switch("-v", "--verbose", "--log-verbose", help="show messages of the library")
    help = "4 or more: same as -v; lower numbers have no effect"
    add("-lv", "--verbosity", "--log-verbosity", parse=integer, env="LLAMA_ARG_LOG_VERBOSITY", help=help)
    options.switch("--offline", env=True, help="never download a model (off)")
    add("-fit", "--fit", parse=switched, metavar="on|off", env=True, help="same as --preflight")
    parser.add_argument("--usage", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"pylongctx {__version__}", help=argparse.SUPPRESS)
    _add_long_context(Options(parser, "long context"))
    _add_all_devices(Options(parser, "devices"))
    add_rope_options(Options(parser, "positions"), extended=True)
    add_draft_options(parser)
    add_foreign_options(Options(parser))


def _add_long_context(options: Options) -> None:
    add_method_options(options)
    # before --overflow: both set one value, and only the first has a variable
    options.switch("--context-shift", off=True, env=True, help="same as --overflow evict_middle", dest="overflow")
    help = "how to handle a text that does not fit into the context (error)"
    options.add("--overflow", parse=one_of(OVERFLOWS), metavar="|".join(OVERFLOWS), help=help)
    help = "folder that stores KV caches, so that each prefix is prefilled once (off)"
    options.add("--kv-store", metavar="FOLDER", help=help)
    options.add("--kv-store-limit", parse=mib, metavar="MIB", help="size limit of that folder in MiB (20480)")
    options.switch("--kv-store-words", off=True, help="store the first words of each text, for pylongctx kv ls (on)")


def _add_all_devices(options: Options) -> None:
    _add_devices(options)
    add_tensor_options(options)
    options.switch("--op-offload", off=True, help="run operations on host tensors on the GPU (llama.cpp's default)")
    env, help = "LLAMA_ARG_KV_OFFLOAD", "keep K and V on the device of their layer (on)"
    options.switch("-kvo", off=("-nkvo", "--no-kv-offload"), env=env, help=help, dest="kvo")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the parts of pass-key prompts."""
    parser.add_argument("--haystack", default="sentences", metavar="FILE", help="'sentences' (default) or a text file")
    parser.add_argument("--separator", choices=("space", "newline"), default="space", help="between the parts (space)")
    parser.add_argument("-s", "--seed", type=int, default=0, metavar="N", help="seed of keys and depths (0)")


def _add_model(parser: argparse.ArgumentParser, options: Options, positional: bool = True) -> None:
    if positional:
        parser.add_argument("positional_model", nargs="?", metavar="model", help=MODEL)
    else:
        parser.set_defaults(positional_model=None)
    help = "the model, as an option" if positional else "GGUF file, or a name that pylongctx get lists (smollm2-135m)"
    options.add("-m", "--model", metavar="FILE", env=True, help=help)
    help = "a model on huggingface.co: user/name, or user/name:quant (Q4_K_M)"
    options.add("-hf", "-hfr", "--hf-repo", metavar="REPO", env=True, help=help)
    options.add("-hff", "--hf-file", metavar="FILE", env=True, help="file of the -hf model, instead of a quant")


def _add_context(options: Options) -> None:
    add = options.add
    add("-t", "--threads", parse=integer, env=True, help="threads for generation")
    add("-tb", "--threads-batch", parse=integer, help="threads for prefill")
    add("-b", "--batch-size", parse=integer, env="LLAMA_ARG_BATCH", help="tokens per batch (512)")
    add("-ub", "--ubatch-size", parse=integer, env="LLAMA_ARG_UBATCH", help="tokens per graph (512)")
    for letter in "kv":
        help = f"type of {letter.upper()} in the cache (f16)"
        add(f"-ct{letter}", f"--cache-type-{letter}", metavar="TYPE", env=True, help=help)
    options.switch("--swa-full", env=True, help="full-size KV cache for sliding windows")
    help = "bitwise identical results in any batch, with cached prefixes and drafts (off)"
    options.switch("--deterministic", help=help)
    options.switch("--preflight", off=True, help="check that the model and the KV cache fit into memory (on)")


def _add_devices(options: Options) -> None:
    add = options.add
    help = "layers on devices (-1 or all; auto: what fits; default of chat, complete, ask and serve: auto, else 0)"
    add("-ngl", "--gpu-layers", "--n-gpu-layers", parse=layers, env="LLAMA_ARG_N_GPU_LAYERS", help=help)
    add("--rpc", metavar="HOST:PORT,...", env=True, help="devices of machines that run pylongctx rpc-server")
    help = "split between devices, such as 3,1 (by free memory)"
    add("-ts", "--tensor-split", parse=shares, metavar="N,N,...", env=True, help=help)
    help = "how the model is split across devices (layer)"
    add("-sm", "--split-mode", parse=split_mode, metavar=f"{{{','.join(SPLIT_MODES)}}}", env=True, help=help)
    add("-mg", "--main-gpu", parse=integer, env=True, help="device for --split-mode none")
    help = (
        "keep the KV cache in a slower memory, with up to MIB close: MIB or host,MIB in host memory, close is the GPU; "
        "disk,MIB in a file, close is host memory; MIB is auto where it is missing; alone same as -kvo"
    )
    add("--kv-offload", parse=offload, metavar="[WHERE,]MIB", help=help, optional=True)
    add("--kv-offload-path", metavar="FOLDER", help="folder of the file of --kv-offload disk (the cache folder)")


# ---- arguments ----


def model_path(args: argparse.Namespace) -> str:
    """Return the file of the requested model; a missing one of the catalogue is downloaded first."""
    if args.positional_model and args.model and not isinstance(args.model, FromEnvironment):
        raise ValueError("the model is given twice: as an argument and with --model")
    if getattr(args, "hf_repo", None):
        return _of_hub(args)
    name = _model_name(args)
    if getattr(args, "offline", None) and (entry := find(name)) is not None and entry.path() is None:
        raise ValueError(f"--offline: {name} is not downloaded; run pylongctx get {name}")
    return fetched(name)


def _model_name(args: argparse.Namespace) -> str:
    return str(args.positional_model or args.model or embedded_model())


def model_label(args: argparse.Namespace) -> str:
    """Return the model's name for messages: from the catalogue, the hub, or its file."""
    return str(getattr(args, "hf_repo", None) or Path(_model_name(args)).name)


def _of_hub(args: argparse.Namespace) -> str:
    from pylongctx.catalog.huggingface import by_quant

    for option, value in (("a model", args.positional_model), ("--model", args.model)):
        if value and not isinstance(value, FromEnvironment):
            raise ValueError(f"-hf {args.hf_repo} and {option} {value} name two models: leave out one of them")
    if getattr(args, "offline", None):
        raise ValueError(f"--offline: -hf {args.hf_repo} needs huggingface.co; give the path of a local file")
    return by_quant(args.hf_repo, args.hf_file)


def advised_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the default sampling settings of a model of the catalogue; empty for a file."""
    entry = find(_model_name(args))
    return {} if entry is None else dict(entry.sampling)


def llama_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of Llama that were given; all others keep their defaults."""
    found = {keyword: value for keyword, name in PLAIN.items() if (value := getattr(args, name, None)) is not None}
    found.setdefault("n_threads_batch", args.threads)
    if (fit := getattr(args, "fit", None)) is not None:
        found.setdefault("preflight", fit)
    if (getattr(args, "verbosity", None) or 0) >= VERBOSE:
        found.setdefault("verbose", True)
    found |= override_arguments(args)
    if isinstance(policy := found.get("overflow"), bool):
        found["overflow"] = EVICT_MIDDLE if policy else OVERFLOWS[0]
    if found.get("n_gpu_layers") not in (None, 0, AUTO_LAYERS) and "rpc_servers" not in found:
        _warn_without_gpu()
    if args.kv_offload == ON:
        found.setdefault("offload_kqv", True)
    elif args.kv_offload is not None:
        found |= dict(zip(("kv_offload", "kv_offload_mib"), args.kv_offload, strict=True))
    return {"verbose": False} | found


def _warn_without_gpu() -> None:
    from pylongctx._arguments import has_gpu, why_no_gpu

    if not has_gpu():
        LOG.warning("-ngl has no effect, everything runs on the CPU: %s", why_no_gpu())


def open_llama(args: argparse.Namespace, progress: "Callable[[int, int], None] | None" = None) -> "Llama":
    """Open the model with all given options, see ``open_model``."""
    from pylongctx.llama import Llama

    return open_model(args, Llama, progress)


def open_model(
    args: argparse.Namespace,
    make: "Callable[..., Adaptable]",
    progress: "Callable[[int, int], None] | None" = None,
    n_seq: int = 1,
) -> "Adaptable":
    """Return ``make(**arguments)`` for the given arguments of Llama, with the requested adapters and drafts.

    ``n_seq``: sequences that generate concurrently, 0 for a model that generates nothing.
    """
    try:
        more = {"method": chosen_method(args), "progress_callback": progress, **_constructor(args)}
        draft = draft_model(args, more, n_seq) if n_seq else None
        more |= own_draft(args) if n_seq else {}
        try:
            opened = make(model_path(args), **more, draft_model=draft)
            try:
                for path, scale in _loras(args):
                    opened.add_lora(path, scale)
            except BaseException:
                opened.close()
                raise
        except BaseException:
            if draft is not None:
                draft.close()
            raise
    except (ValueError, NotImplementedError) as reason:
        raise ValueError(with_origins(reason, args)) from reason
    except OSError as reason:
        if args.kv_store is None or reason.filename is None or not str(reason.filename).startswith(args.kv_store):
            raise
        message = f"--kv-store {args.kv_store}: {reason.strerror}; give a writable folder"
        raise ValueError(message) from reason
    return opened


def _constructor(args: argparse.Namespace) -> dict[str, Any]:
    found = {"n_gpu_layers": AUTO_LAYERS} | llama_arguments(args) | _loading(args)
    if args.rope_scale is not None:
        if args.rope_freq_scale is not None:
            raise ValueError("--rope-scale and --rope-freq-scale set the same value: give one of them")
        if not 0 < args.rope_scale < float("inf"):
            raise ValueError(f"--rope-scale must be a number above 0, not {args.rope_scale}")
        found["rope_freq_scale"] = 1 / args.rope_scale
    more = {"seed": "seed", "last_n_tokens_size": "repeat_last_n"}
    found |= {keyword: value for keyword, name in more.items() if (value := getattr(args, name, None)) is not None}
    template = one(args, "chat_template", "chat_template_file")
    return found if template is None else found | {"chat_format": template}


def _loading(args: argparse.Namespace) -> dict[str, Any]:
    """Return how the weights are loaded."""
    switches = {"use_mmap": args.mmap, "use_mlock": args.mlock}
    given = {name: value for name, value in switches.items() if value is not None}
    if given and args.load_mode is not None:
        raise ValueError("--load-mode sets the same as --mmap and --mlock: give one of them")
    return given or LOAD_MODES[args.load_mode or "auto"]


def _loras(args: argparse.Namespace) -> list[tuple[str, float]]:
    plain = [(path, 1.0) for paths in args.lora or [] for path in paths.split(",")]
    for text in (item for items in args.lora_scaled or [] for item in items.split(",")):
        path, colon, scale = text.rpartition(":")
        if not colon:
            raise ValueError(f"--lora-scaled takes FILE:SCALE, not {text!r}")
        plain.append((path, number(scale)))
    return plain


# ---- the method ----

METHOD_VARIABLE = "LCTX_METHOD"
AUTO = "auto"  # full attention where pylongctx's KV cache supports the model, else none

# option: its method, and the parameter of that method
BELONGS = {
    "grp_attn_n": ("selfextend", "group_size"),
    "grp_attn_w": ("selfextend", "neighbor_window"),
    "chunk_size": ("longheads", "chunk_size"),
    "attn_window": ("longheads", "window"),
}


def add_method_options(options: Options) -> None:
    """Add the method, its sizes and its memory limit, see ``chosen_method``."""
    add = options.add
    add("--method", metavar="M", env=METHOD_VARIABLE, help="method for long contexts: longheads+corm, none, ... (auto)")
    add("-gan", "--grp-attn-n", parse=integer, env=True, help="SelfExtend's group_size")
    add("-gaw", "--grp-attn-w", parse=integer, env=True, help="SelfExtend's neighbor_window")
    add("--chunk-size", parse=integer, help="LongHeads' chunk_size")
    add("--attn-window", parse=integer, help="LongHeads' window")
    add("--kv-limit", parse=mib, metavar="MIB", help="limit of the KV cache in MiB")


def add_methods(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the methods of a command that compares several."""
    parser.add_argument("--method", action="append", metavar="M", help=help)
    help = "several methods at once"
    parser.add_argument("--methods", dest="method", action="extend", type=method_list, metavar="M,M", help=help)


def method_list(text: str) -> list[str]:
    """Return the methods of ``"full,window,n_sink=4"``: a part with ``=`` is an option of the method before it."""
    found: list[str] = []
    for part in text.split(","):
        if "=" in part.partition("+")[0] and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def read_method(spec: str) -> Method | str | None:
    """Return the method of a string; None means llama.cpp's own KV cache, AUTO chooses by model."""
    return AUTO if spec == AUTO else named(spec)


def name_of(method: Method | None) -> str:
    """Return the string of a method."""
    return NONE if method is None else str(method)


def short_name(method: Method | None) -> str:
    """Return the names of a method's parts, without their options."""
    return "+".join(part.name for part in method.parts) if method else name_of(None)


def chosen_method(args: argparse.Namespace) -> Method | str | None:
    """Return the requested method, see ``read_method``."""
    given = {name: value for name in BELONGS if (value := getattr(args, name)) is not None}
    owners = sorted({BELONGS[name][0] for name in given})
    if len(owners) > 1:
        raise ValueError(f"{_spelled(given)} belong to different methods, {' and '.join(owners)}: choose one")
    spec = args.method or (owners[0] if owners else AUTO)
    method = read_method(spec)
    if not given:
        return method
    owner = owners[0]
    if method is None or isinstance(method, str) or owner not in [part.name for part in method.parts]:
        raise ValueError(f"{_spelled(given)} belong to {owner}, not to method {spec}: leave out one of them")
    values: dict[str, Any] = {BELONGS[name][1]: value for name, value in given.items()}
    parts = [_with(part, values) if part.name == owner else part for part in method.parts]
    base, *rules = parts
    return base + rules[0] if rules else base


def with_method(args: argparse.Namespace, spec: str) -> argparse.Namespace:
    """Return the arguments with another method, without the sizes that were given for the first one."""
    return argparse.Namespace(**vars(args) | dict.fromkeys(BELONGS) | {"method": spec})


def _with(method: Method, values: dict[str, Any]) -> Method:
    for name, value in values.items():
        if getattr(method, name) not in (None, value):
            raise ValueError(f"{name} of {method.name} is given twice: {getattr(method, name)} and {value}")
    return replace(method, **values)


def _spelled(given: dict[str, Any]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in given)


# ---- rotary positions ----

YARN = {
    "ext-factor": "extrapolation mix factor",
    "attn-factor": "attention magnitude factor",
    "beta-slow": "high correction dim, or alpha",
    "beta-fast": "low correction dim, or beta",
}


def add_rope_options(options: Options, extended: bool = False) -> None:
    """Add base and scale of RoPE; if ``extended``, also its kind and YaRN's numbers."""
    add = options.add
    add("--rope-freq-base", parse=number, metavar="X", env=True, help="RoPE base (the model's)")
    add("--rope-freq-scale", parse=number, metavar="X", env=True, help="RoPE scale (the model's)")
    if not extended:
        return
    names = f"{{{','.join(ROPE_SCALINGS)}}}"
    help = "RoPE scaling (the model's)"
    add("--rope-scaling", parse=rope_scaling, metavar=names, env="LLAMA_ARG_ROPE_SCALING_TYPE", help=help)
    add("--rope-scale", parse=number, metavar="X", env=True, help="1 / --rope-freq-scale")
    add("--yarn-orig-ctx", parse=integer, env=True, help="trained context (the model's)")
    for name, meaning in YARN.items():
        add(f"--yarn-{name}", parse=number, metavar="X", env=True, help=f"YaRN's {meaning}")


# ---- metadata and the placement of tensors ----

TENSOR_VARIABLE = "LLAMA_ARG_OVERRIDE_TENSOR"
MAX_LAYERS = 512
DENSE = r"\.ffn_(up|down|gate)\."
TRUTHS = {"true": True, "false": False}
TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": TRUTHS.__getitem__, "str": str}


def add_tensor_options(options: Options) -> None:
    """Add the placement of tensors, see ``override_arguments``."""
    help = "buffer types, such as CPU, for tensors whose names match regular expressions"
    tensors, metavar = ("-ot", "--override-tensor"), "PATTERN=TYPE,..."
    options.several(*tensors, parse=_buffers, metavar=metavar, env=TENSOR_VARIABLE, help=help)
    options.switch("-cmoe", "--cpu-moe", env=True, help="keep the experts of all layers in host memory")
    help = "keep the experts of the first N layers in host memory"
    options.add("-ncmoe", "--n-cpu-moe", parse=_layers, env=True, help=help)
    help = "keep the dense feed-forward weights of the first N layers in host memory"
    options.add("-ncffn", "--n-cpu-ffn", parse=_layers, env=True, help=help)


def override_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of Llama that were given."""
    metadata = {key: value for pairs in getattr(args, "override_kv", None) or () for key, value in pairs}
    given = getattr(args, "override_tensor", None)
    if given is None and hasattr(args, "override_tensor") and (text := os.environ.get(TENSOR_VARIABLE)):
        given = [_buffers(text)]
    tensors = {pattern: kind for pairs in given or () for pattern, kind in pairs}
    if getattr(args, "cpu_moe", None):
        tensors[EXPERTS] = "CPU"
    for name, pattern in (("n_cpu_moe", EXPERTS), ("n_cpu_ffn", DENSE)):
        if n := getattr(args, name, None):
            tensors[first_layers(n, pattern)] = "CPU"
    both = {"kv_overrides": metadata, "override_tensor": tensors}
    return {name: found for name, found in both.items() if found}


def _pairs(text: str) -> list[tuple[str, Any]]:
    return [_pair(item) for item in next(csv.reader([text]), [])]  # a part with a comma is quoted


def _pair(item: str) -> tuple[str, Any]:
    key, _, typed = item.partition("=")
    kind, colon, value = typed.partition(":")
    if not (key and colon and kind in TYPES):
        raise ValueError(f"{item!r} is not KEY=TYPE:VALUE, where TYPE is {', '.join(TYPES)}")
    try:
        return key, TYPES[kind](value)
    except (ValueError, KeyError):
        raise ValueError(f"{value!r}, the value of {key}, is not a valid {kind}") from None


def _buffers(text: str) -> list[tuple[str, str]]:
    found = []
    for item in text.split(","):
        pattern, equals, kind = item.rpartition("=")
        if not (pattern and equals and kind):
            raise ValueError(f"{item!r} is not PATTERN=TYPE, such as blk\\.0\\.=CPU")
        found.append((pattern, kind))
    return found


def _layers(text: str) -> int:
    n = integer(text)
    if not 0 <= n <= MAX_LAYERS:
        raise ValueError(f"{n} layers: the number must be from 0 to {MAX_LAYERS}")
    return n


# ---- options of llama.cpp that are not supported ----


class Refused(NamedTuple):
    """An option: its names, the reason, its variable, and the values that request the existing behavior."""

    names: str
    reason: str
    variable: str | None = None
    but: tuple[str, ...] = ()


# those whose users need to know what to use instead; any other is an unknown option
REFUSED = (
    Refused(
        "--keep",
        "use --overflow evict_middle, which keeps the first tokens of a text, or n_keep in /completion of the server",
        but=("0",),
    ),
    Refused("-mm --mmproj", "only text input is supported", "LLAMA_ARG_MMPROJ"),
    Refused("-dev --device", "choose devices with CUDA_VISIBLE_DEVICES, -ts, -sm and -mg", "LLAMA_ARG_DEVICE"),
    Refused("--control-vector", "control vectors are not supported; LoRA adapters are: --lora"),
    Refused("-cnv --conversation -i --interactive", "use pylongctx chat for conversations"),
    Refused(
        "-kvu --kv-unified",
        "each of the -np sequences has -c tokens and allocates pages as it grows; --kv-limit bounds their sum",
        "LLAMA_ARG_KV_UNIFIED",
    ),
)
REFUSED_BY_SERVER = (
    Refused("--tools", "the chat page has no tools; clients send tools in requests", "LLAMA_ARG_TOOLS"),
)
# options with the value that requests what pylongctx always does
FIXED = {"--cpu-strict": "0", "--cpu-strict-batch": "0", "--prio": "0", "--prio-batch": "0", "--poll": "0"}
FIXED |= {"--poll-batch": "0", "-lzm --lazy-mode": "auto", "--log-colors": "off"}
FIXED_OF_SERVER = {"--embd-normalize": "2"}
# switches that request what pylongctx always does
ACCEPTED = (
    *("--no-warmup", "--no-perf", "--log-disable", "--simple-io", "--repack", "--no-mmproj", "--no-mmproj-auto"),
    *("--no-mmproj-offload", "--no-log-jsonl", "--no-log-prefix", "--no-log-timestamps", "-no-kvu", "--no-kv-unified"),
    *("--no-cache-idle-slots", "--no-spec-draft-backend-sampling"),
)
ACCEPTED_BY_SERVER = (
    *("--metrics", "--props", "-cb", "--cont-batching", "--no-cors-credentials", "--no-ui-mcp-proxy"),
    *("--no-webui-mcp-proxy", "-no-ag", "--no-agent", "--reasoning-preserve", "--no-skip-chat-parsing"),
)
# options with a value that have no effect in llama.cpp either
WITHOUT_EFFECT = ("-dt", "--defrag-thold")


def add_foreign_options(options: Options, server: bool = False) -> None:
    """Accept options that request the existing behavior, and refuse some others with a reason; ``server``: its own."""
    for names, reason, variable, but in REFUSED_BY_SERVER if server else REFUSED:
        options.refuse(*names.split(), env=variable, reason=reason, but=but)
    for names, value in (FIXED_OF_SERVER if server else FIXED).items():
        options.refuse(*names.split(), reason=f"{value} is what pylongctx does", but=(value,))
    for name in ACCEPTED_BY_SERVER if server else ACCEPTED:
        options.accept(name)
    if not server:
        options.accept(*WITHOUT_EFFECT, value=True)
