"""Checks of the constructor's arguments, and the native settings derived from them."""

import os
import warnings
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from pylongctx._cache_folder import cache_folder
from pylongctx._enums import AUTO_LAYERS, DISK, EVICT_MIDDLE, OFFLOADS, OVERFLOWS, SPLIT_MODES
from pylongctx._free import available_cores, available_cpus
from pylongctx._guess import guess
from pylongctx._lib import build_info, ffi, lib, text
from pylongctx.methods import METHODS
from pylongctx.model_files.overrides import checked_metadata, checked_tensors

EVERY_LAYER = 2**31 - 1

# Arguments of older llama-cpp-python versions, accepted without effect as there.
LEGACY = frozenset({"n_parts", "f16_kv", "mul_mat_q"})

# Texts that one batch embeds.
MAX_TEXTS = 64

# Settings that determine the KV entries, in addition to model, method and types.
ROPE_FIELDS = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
CONTEXT_FIELDS = (
    *ROPE_FIELDS,
    "pooling_type",
    "attention_type",
    "offload_kqv",
    "op_offload",
    "no_perf",
    "swa_full",
    "deterministic",
)

# name: (default, why another value is refused)
LATER: dict[str, tuple[Any, str]] = {
    "lora_base": (
        None,
        "an adapter applies to the open model; pass its base model as model_path",
    ),
    "numa": (False, "NUMA placement is not supported; use numactl"),
    "tokenizer": (None, "only the tokenizer of the GGUF file is supported; pass token ids instead of text"),
    "spm_infill": (False, "infill prompts differ between models: write the prompt yourself and pass no suffix"),
}


def check_later(arguments: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for an argument whose value is not supported yet."""
    for name, (default, reason) in LATER.items():
        if arguments[name] != default:
            raise NotImplementedError(f"{name}={arguments[name]!r}: {reason}")


def check_unknown(extra: Mapping[str, Any], known: list[str]) -> None:
    """Warn about unknown argument names, with the closest known name."""
    for name in extra:
        if name in LEGACY:
            continue
        hint = guess(name, known)
        warnings.warn(f"Llama ignores the unknown argument {name!r}{hint}", RuntimeWarning, stacklevel=3)


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return ``value`` when it is an integer from ``minimum`` to 2**31 - 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if not minimum <= value < 2**31:
        raise ValueError(f"{name} must be from {minimum} to {2**31 - 1}, not {value}")
    return int(value)


def check_bytes(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is None or a number of bytes."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
        raise ValueError(f"{name} must be a number of bytes or None, not {value!r}")


def thread_counts(n_threads: int | None, n_threads_batch: int | None) -> tuple[int, int]:
    """Return both thread counts; None means the physical cores, and all available CPUs for prefill."""
    few = available_cores() if n_threads is None else n_threads
    many = available_cpus() if n_threads_batch is None else n_threads_batch
    return check_count("n_threads", few), check_count("n_threads_batch", many)


def kv_type(name: str, value: int | str | None) -> int:
    """Return the ggml type of a KV cache given by number or name; None is f16."""
    if value is None or isinstance(value, str):
        value = value or "f16"
        number: int = lib.lctx_type_from_name(value.encode())
        if number < 0:
            raise ValueError(f"unknown {name} {value!r}; names are those of ggml, for instance f16, q8_0, q4_0")
        return number
    number = check_count(name, value, 0)
    if lib.lctx_type_name(number) == ffi.NULL or not text(lib.lctx_type_name(number)):
        raise ValueError(f"unknown {name} {number}: not a ggml type")
    return number


def model_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a ``Model`` that the arguments set."""
    names = ("main_gpu", "vocab_only", "use_mmap", "use_mlock", "deterministic")
    n_gpu_layers = given["n_gpu_layers"]
    if isinstance(n_gpu_layers, str) and n_gpu_layers != AUTO_LAYERS:
        known = f"a number of layers, -1 for all, or {AUTO_LAYERS!r}"
        raise ValueError(f"n_gpu_layers must be {known}, not {n_gpu_layers!r}")
    if given["split_mode"] not in SPLIT_MODES.values():
        raise ValueError(f"split_mode must be one of {SPLIT_MODES}, not {given['split_mode']!r}")
    return {
        "n_gpu_layers": EVERY_LAYER if n_gpu_layers in (-1, AUTO_LAYERS) else n_gpu_layers,
        "split_mode": int(given["split_mode"]),
        "tensor_split": [float(share) for share in given["tensor_split"] or ()],
        "rpc_servers": given["rpc_servers"] or "",
        "kv_overrides": checked_metadata(given["kv_overrides"]),
        "override_tensor": checked_tensors(given["override_tensor"]),
        **{k: int(given[k]) for k in names},
    }


def context_settings(given: Mapping[str, Any], threads: tuple[int, int]) -> dict[str, Any]:
    """Return the fields of ``lctx_context_params`` that the arguments set."""
    kv_limit = given["kv_limit"]
    check_bytes("kv_limit", kv_limit)
    n_batch, embedding = check_count("n_batch", given["n_batch"]), bool(given["embedding"])
    settings = {name: given[name] for name in CONTEXT_FIELDS if given[name] is not None}  # None: llama.cpp's default
    return settings | {
        "n_ctx": check_count("n_ctx", given["n_ctx"], 0) or (n_batch if embedding else 0),
        "n_batch": n_batch,
        # a text is embedded in one batch
        "n_ubatch": n_batch if embedding else min(n_batch, check_count("n_ubatch", given["n_ubatch"])),
        "n_seq_max": min(n_batch, MAX_TEXTS) if embedding else 1,
        "embeddings": embedding,
        "n_threads": threads[0],
        "n_threads_batch": threads[1],
        "type_k": kv_type("type_k", given["type_k"]),
        "type_v": kv_type("type_v", given["type_v"]),
        "kv_limit": min(kv_limit or 0, 2**64 - 1),
        **kv_offload(given["kv_offload"], given["kv_offload_mib"], given["kv_offload_path"]),
    }


def evicts(given: Mapping[str, Any]) -> bool:
    """Return True if tokens may be evicted from a text that does not fit."""
    policy = given["overflow"]
    if policy not in OVERFLOWS:
        rules = [name for name, method in METHODS.items() if method.role == "rule" and not method.waits]
        hint = f": an eviction rule is part of the method, such as 'longheads+{policy}'" if policy in rules else ""
        raise ValueError(f"overflow must be {' or '.join(map(repr, OVERFLOWS))}, not {policy!r}{hint}")
    if policy == EVICT_MIDDLE and (given["embedding"] or given["vocab_only"]):
        raise ValueError(f"overflow={policy!r} needs completions: it cannot be combined with embedding or vocab_only")
    return bool(policy == EVICT_MIDDLE)


def cache_reuse(given: Mapping[str, Any]) -> int:
    """Return how many tokens after a gap are reused at least; 0: none are."""
    n = check_count("cache_reuse", given["cache_reuse"], 0)
    if n and (given["embedding"] or given["vocab_only"]):
        raise ValueError(f"cache_reuse={n} needs completions: it cannot be combined with embedding or vocab_only")
    if n and given["deterministic"]:
        raise ValueError(f"cache_reuse={n} lets answers depend on earlier prompts: leave it or deterministic=True out")
    return n


def store_settings(given: Mapping[str, Any], otherwise: int) -> tuple[str, int, bool] | None:
    """Return the folder of the KV store, its limit in bytes, and whether first words are kept; None for no store."""
    folder, limit, words = given["kv_store"], given["kv_store_limit"], bool(given["kv_store_words"])
    if folder is None:
        if not words:
            raise ValueError("kv_store_words needs kv_store")
        if limit is not None:
            raise ValueError("kv_store_limit needs kv_store")
        return None
    check_bytes("kv_store_limit", limit)
    if given["embedding"] or given["vocab_only"]:
        raise ValueError("kv_store needs completions: it cannot be combined with embedding or vocab_only")
    return os.fspath(folder), otherwise if limit is None else int(limit), words


def kv_offload(where: str | None, mib: int | None, path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the fields of ``lctx_context_params`` for K and V in a slower memory."""
    if where not in (None, *OFFLOADS):
        raise ValueError(f"kv_offload must be {' or '.join(map(repr, OFFLOADS))} or None, not {where!r}")
    if path is not None and where != DISK:
        raise ValueError(f"kv_offload_path needs kv_offload={DISK!r}")
    if where is None:
        if mib is not None:
            raise ValueError("kv_offload_mib needs kv_offload='host' or 'disk'")
        return {"kv_offload": 0}
    close = int(lib.LCTX_OFFLOAD_AUTO) if mib is None else check_count("kv_offload_mib", mib) << 20
    # the settings own the text
    folder = ffi.new("char[]", os.fsencode(cache_folder() if path is None else path)) if where == DISK else ffi.NULL
    return {"kv_offload": close, "kv_offload_folder": folder}


def warn_without_device(n_gpu_layers: int | str, rpc_servers: str | None, verbose: bool) -> None:
    """Warn of GPU layers without a GPU, if ``verbose``, and of RPC servers that get no layer."""
    if verbose and n_gpu_layers not in (0, AUTO_LAYERS) and not rpc_servers and not has_gpu():
        reason = f"n_gpu_layers={n_gpu_layers} has no effect, everything runs on the CPU: {why_no_gpu()}"
        warnings.warn(reason, UserWarning, stacklevel=4)  # blames the caller of Llama
    if n_gpu_layers == 0 and rpc_servers:
        reason = f"rpc_servers={rpc_servers!r} has no effect with n_gpu_layers=0: no layer goes there"
        warnings.warn(reason, UserWarning, stacklevel=4)


def why_no_gpu() -> str:
    """Return why the library cannot use a GPU, and the way out."""
    if build_info().get("vulkan"):
        return (
            "Vulkan finds no GPU: check that vulkaninfo --summary lists one; one in software (llvmpipe) is used with "
            "GGML_VK_VISIBLE_DEVICES=0 only"
        )
    if build_info()["cuda"] is None:
        return (
            "this build of pylongctx has no GPU backend; install pylongctx-cuda as well, or with the CUDA toolkit "
            "build one with pip install . -C cmake.define.GGML_CUDA=ON"
        )
    return "CUDA finds no GPU: check that nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does not hide it"


def has_gpu() -> bool:
    """Return True if the library was built with a backend other than the CPU."""
    return any(name.upper() not in ("CPU", "BLAS") for name in build_info()["backends"])
