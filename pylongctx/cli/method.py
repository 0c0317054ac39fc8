"""The requested method: from --method, or from the options of llama.cpp and LongHeads."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pylongctx.cli.arguments import Options, integer
from pylongctx.cli.values import mib

if TYPE_CHECKING:
    from pylongctx.methods import Method

VARIABLE = "LCTX_METHOD"
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
    add("--method", metavar="M", env=VARIABLE, help="method for long contexts: longheads+corm, none, ... (auto)")
    add("-gan", "--grp-attn-n", parse=integer, env="LLAMA_ARG_GRP_ATTN_N", help="SelfExtend's group_size")
    add("-gaw", "--grp-attn-w", parse=integer, env="LLAMA_ARG_GRP_ATTN_W", help="SelfExtend's neighbor_window")
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


def read_method(spec: str) -> "Method | str | None":
    """Return the method of a string; None means llama.cpp's own KV cache, AUTO chooses by model."""
    from pylongctx.methods import named

    return AUTO if spec == AUTO else named(spec)


def name_of(method: "Method | None") -> str:
    """Return the string of a method."""
    from pylongctx.methods import NONE

    return NONE if method is None else str(method)


def short_name(method: "Method | None") -> str:
    """Return the names of a method's parts, without their options."""
    return "+".join(part.name for part in method.parts) if method else name_of(None)


def chosen_method(args: argparse.Namespace) -> "Method | str | None":
    """Return the requested method, see ``read_method``.

    Raises
    ------
    ValueError
        When an option belongs to another method than the requested one.
    """
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


def _with(method: "Method", values: dict[str, Any]) -> "Method":
    for name, value in values.items():
        if getattr(method, name) not in (None, value):
            raise ValueError(f"{name} of {method.name} is given twice: {getattr(method, name)} and {value}")
    return replace(method, **values)


def _spelled(given: dict[str, Any]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in given)
