"""The identity of KV entries: everything that they depend on except tokens; entries of another one are never used."""

import os
import re
from collections.abc import Mapping
from typing import Any

from pylongctx._arguments import ROPE_FIELDS
from pylongctx._lib import build_info, lib, text
from pylongctx.engine.context import Context
from pylongctx.engine.model import Model
from pylongctx.model_files.digests import FORMAT, ModelFiles

WEIGHTS = "weights"  # a digest of every byte of the model, which takes seconds the first time
TITLE = ("name", "model", "n_params")
OTHER_HEADER = "the metadata, vocabulary or shapes of their files differ"
OTHER_WEIGHTS = "their weights differ, such as after a merge, further training or an edit"
PLAIN = frozenset({"f32", "f16", "bf16"})  # types that are stored without quantization
CONTEXT_MULTIPLE = 256  # llama.cpp pads n_ctx to a multiple of it


def row_identity(model: Model, files: ModelFiles, context: Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity without adapters and ``WEIGHTS``, which is known at once; ``given`` is for ``Llama``."""
    return {
        "format": FORMAT,
        "name": model.metadata().get("general.name", ""),
        "model": model.description(),
        "n_params": model.info.n_params,
        "header": files.header,
        "pages": files.pages,
        "method": context.method,
        **context.types,
        "transformed": not PLAIN.issuperset(context.types.values()) and not _is_set("LLAMA_ATTN_ROT_DISABLE"),
        "factors": _factors(model, files, context),
        **{name: given[name] for name in (*ROPE_FIELDS, "attention_type", "swa_full")},
        **({"deterministic": _kernels()} if given["deterministic"] else {}),
        **({"kv_overrides": dict(sorted(model.overrides.items()))} if model.overrides else {}),
    }


def difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how two identities differ, or the empty string."""
    names = [name for name in {**own, **saved} if saved.get(name) != own.get(name)]
    if not names:
        return ""
    if "format" in names:
        return f"another release of pylongctx saved it, in format {saved.get('format', 1)!r}; this one reads {FORMAT}"
    if reason := _other_model(saved, own, names):
        return reason
    return "; ".join(f"it was saved with {n}={saved.get(n)!r}, this object has {n}={own.get(n)!r}" for n in names)


def _other_model(saved: Mapping[str, Any], own: Mapping[str, Any], names: list[str]) -> str:
    was, here = _title(saved), _title(own)
    if was != here:
        return f"it belongs to another model: {was}; this model is {here}"
    reasons = {"header": OTHER_HEADER, "pages": OTHER_WEIGHTS, WEIGHTS: OTHER_WEIGHTS}
    found = next((reason for name, reason in reasons.items() if name in names), "")
    return found and f"it belongs to another model of the same name, {was}: {found}"


def _title(identity: Mapping[str, Any]) -> str:
    name, model, n_params = (identity.get(key) for key in TITLE)
    return f"{name or 'unnamed'!r} ({model}, {n_params} parameters)"


def _factors(model: Model, files: ModelFiles, context: Context) -> str:
    """Return which of two sets of RoPE factors a model uses; the set for long texts depends on n_ctx."""
    if not any(name.startswith("rope_factors_long") for name in files.tensors):
        return ""
    metadata = model.metadata()
    key = f"{metadata.get('general.architecture')}.rope.scaling.original_context_length"
    trained = int(metadata.get(key, model.info.n_ctx_train))
    return "long" if -(-context.n_ctx // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE > trained else "short"


def _kernels() -> str:
    """Return the kernels in use, since other builds or kinds of CPU round differently."""
    info = build_info()
    names = ("version", "series", "compiler", "build_type")
    return "; ".join([*(str(info[name]) for name in names), text(lib.lctx_system_info())])


def _is_set(variable: str) -> bool:
    """Return True if C's atoi reads a number other than 0 from an environment variable."""
    number = re.match(r"\s*[+-]?\d+", os.environ.get(variable, ""))
    return bool(number and int(number[0]))
