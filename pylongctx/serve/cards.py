"""Descriptions of models: for Ollama's clients, read from their files; and what every model here reads and writes."""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from pylongctx.model_files.digests import stats
from pylongctx.model_files.gguf import FileId, file_id, header_of, shards
from pylongctx.model_files.gguf_checks import Header
from pylongctx.parallel import FILL, NEEDED

Object = dict[str, Any]
# names of quantizations by GGUF's general.file_type
KINDS = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1"},
    **{10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"},
    **{18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S"},
    **{25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
    **{36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4"},
}
MODALITIES = {"input_modalities": ["text"], "output_modalities": ["text"]}  # llama-server's ``architecture``
UNITS = ((1e9, "B", 1), (1e6, "M", 2), (1e3, "K", 0))  # of parameters, with decimals
FOREVER = "9999-12-31T23:59:59Z"  # the expiry of a model that stays loaded


@dataclass(frozen=True)
class Card:
    """The description of a model from its file."""

    size: int  # bytes of all its files
    modified: str
    digest: str  # changes when a file is written or replaced
    details: Object
    info: Object  # the metadata; arrays are null
    capabilities: list[str]  # as far as the file shows them

    def entry(self, name: str) -> Object:
        """Return the fields that all lists of models share."""
        names = {"name": name, "model": name}
        return names | {"modified_at": self.modified, "size": self.size, "digest": self.digest, "details": self.details}

    def shown(self, path: str | None, settings: Mapping[str, Any]) -> Object:
        """Return the description of a model; the settings are written as the lines of a Modelfile."""
        return {
            "license": self.info.get("general.license") or "",
            "modelfile": f"FROM {path}\n",
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in settings.items()),
            "template": self.info.get("tokenizer.chat_template", ""),
            "details": self.details,
            "model_info": self.info,
            "capabilities": self.capabilities,
            "modified_at": self.modified,
        }


def card_of(path: str) -> Card:
    """Return the card of a GGUF file, or of a split model by its first file; InvalidInput when it is unreadable."""
    (found,) = stats([path])
    return _card(path, file_id(found))


@lru_cache(256)
def _card(path: str, identity: FileId) -> Card:
    header = header_of(path)
    paths = shards(path, header.meta.get("split.count", 1))
    found = stats(paths)
    headers = [header, *map(header_of, paths[1:])]
    n_params = sum(math.prod(tensor.dims) for one in headers for tensor in one.tensors)
    written = datetime.fromtimestamp(found[0].st_mtime, timezone.utc)
    return Card(
        size=sum(one.st_size for one in found),
        modified=stamp(written),
        digest=hashlib.sha256(repr([os.path.abspath(path), identity]).encode()).hexdigest(),
        details=_details(header, n_params),
        info={"general.parameter_count": n_params} | {key: _value(one) for key, one in header.meta.items()},
        capabilities=_capabilities(header),
    )


def _details(header: Header, n_params: int) -> Object:
    kind = header.meta.get("general.file_type")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": header.arch,
        "families": [header.arch],
        "parameter_size": count_text(n_params),
        "quantization_level": KINDS.get(kind, "unknown") if isinstance(kind, int) else "unknown",
    }


def _capabilities(header: Header) -> list[str]:
    template, causal = header.meta.get("tokenizer.chat_template"), header.meta.get(f"{header.arch}.attention.causal")
    source = template.decode("utf-8", "replace") if isinstance(template, bytes) else ""
    spelled = set(header.meta.get("tokenizer.ggml.tokens") or ())
    can = {
        "completion": causal is not False,
        "tools": "tools" in source,
        "thinking": thinks(source),
        "insert": all(_has(name, header.meta, spelled) for name in NEEDED),
        "embedding": causal is False,
    }
    return [name for name, able in can.items() if able]


def _has(name: str, meta: Mapping[str, Any], spelled: set[Any]) -> bool:
    """Return True if a vocabulary has fill-in-the-middle tokens."""
    old, texts = FILL[name]
    known = any(f"tokenizer.ggml.{one}_token_id" in meta for one in (name, old))
    return known or any(text.encode() in spelled for text in texts)


def thinks(template: str) -> bool:
    """Return True if a chat template supports reasoning."""
    return any(word in template for word in ("enable_thinking", "reasoning", "<think>", "thinking"))


def count_text(n: int) -> str:
    """Return a number of parameters in Ollama's short form."""
    for unit, letter, decimals in UNITS:
        if n >= unit:
            return f"{n / unit:.{decimals}f}{letter}"
    return str(n)


def _value(value: Any) -> Any:
    """Return a JSON value; the long arrays of vocabularies become null."""
    if isinstance(value, list):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def stamp(when: datetime) -> str:
    """Return a time in Ollama's form."""
    return when.isoformat().replace("+00:00", "Z")
