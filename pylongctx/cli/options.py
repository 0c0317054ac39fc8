"""Options that several commands share, spelled as llama.cpp spells them."""

import argparse
from typing import Any

from pylongctx.models import embedded_model

SPLIT_MODES = ("none", "layer", "row")  # with llama.cpp's numbers


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the model and everything that configures its context."""
    parser.add_argument("positional_model", nargs="?", metavar="model", help="GGUF file (default: the embedded model)")
    parser.add_argument("-m", "--model", help="the same, as an option")
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="threads for one token")
    parser.add_argument("-tb", "--threads-batch", type=int, metavar="N", help="threads for a prompt")
    parser.add_argument("-b", "--batch-size", type=int, default=512, metavar="N", help="tokens per batch (512)")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512, metavar="N", help="tokens per graph (512)")
    parser.add_argument("-ctk", "--cache-type-k", default="f16", metavar="TYPE", help="type of K in the cache (f16)")
    parser.add_argument("-ctv", "--cache-type-v", default="f16", metavar="TYPE", help="type of V in the cache (f16)")
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=0, metavar="N", help="layers on devices (0; -1: all)")
    parser.add_argument("--rpc", metavar="HOST:PORT,...", help="devices of machines that run pylongctx rpc-server")
    parser.add_argument(
        "-ts", "--tensor-split", type=_shares, metavar="N,N,...", help="shares of the devices (by memory)"
    )
    parser.add_argument("-sm", "--split-mode", choices=SPLIT_MODES, default="layer", help="among devices (layer)")
    parser.add_argument(
        "-mg", "--main-gpu", type=int, default=0, metavar="N", help="the device, with --split-mode none"
    )
    parser.add_argument(
        "--kv-offload", type=_mib, metavar="MIB", help="K and V in memory of the host, but for so much (auto)"
    )
    parser.add_argument(
        "--no-preflight", dest="preflight", action="store_false", help="open what may not fit into memory"
    )
    parser.add_argument("--rope-freq-base", type=float, default=0.0, metavar="X", help="RoPE base (the model's)")
    parser.add_argument("--rope-freq-scale", type=float, default=0.0, metavar="X", help="RoPE scale (the model's)")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add what the pass-key prompts are made of."""
    parser.add_argument("--haystack", default="sentences", metavar="FILE", help="'sentences' (default) or a text file")
    parser.add_argument("--separator", choices=("space", "newline"), default="space", help="between the parts (space)")
    parser.add_argument("-s", "--seed", type=int, default=0, metavar="N", help="seed of keys and depths (0)")


def _shares(text: str) -> list[float]:
    return [float(share) for share in text.split(",")]


def _mib(text: str) -> int:
    """MiB as an integer; 0 stands for auto."""
    return 0 if text == "auto" else int(text)


def model_path(args: argparse.Namespace) -> str:
    """Return the model that was asked for.

    Raises
    ------
    ValueError
        When it is given twice.
    """
    if args.model and args.positional_model:
        raise ValueError("the model is given twice: as an argument and with --model")
    return str(args.model or args.positional_model or embedded_model())


def llama_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of Llama."""
    return {
        "n_threads": args.threads,
        "n_threads_batch": args.threads_batch if args.threads_batch is not None else args.threads,
        "n_batch": args.batch_size,
        "n_ubatch": args.ubatch_size,
        "type_k": args.cache_type_k,
        "type_v": args.cache_type_v,
        "n_gpu_layers": args.gpu_layers,
        "rpc_servers": args.rpc,
        "tensor_split": args.tensor_split,
        "split_mode": SPLIT_MODES.index(args.split_mode),
        "main_gpu": args.main_gpu,
        "kv_offload": None if args.kv_offload is None else "host",
        "kv_offload_mib": args.kv_offload or None,
        "preflight": args.preflight,
        "rope_freq_base": args.rope_freq_base,
        "rope_freq_scale": args.rope_freq_scale,
        "verbose": False,
    }
