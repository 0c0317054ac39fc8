"""Training-free long context for GGUF models, with the API of llama_cpp.Llama."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pylongctx.methods import H2O, Corm, Full, LongHeads, Scissorhands, SelfExtend, Tova, Window

if TYPE_CHECKING:
    from pylongctx.cache import LlamaCache, LlamaDiskCache, LlamaRAMCache
    from pylongctx.llama import Llama
    from pylongctx.sampling import LogitsProcessorList, MinTokensLogitsProcessor, StoppingCriteriaList
    from pylongctx.state import LlamaState

__version__ = "0.1.0"
__all__ = [
    "H2O",
    "Corm",
    "Full",
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaRAMCache",
    "LlamaState",
    "LogitsProcessorList",
    "LongHeads",
    "MinTokensLogitsProcessor",
    "Scissorhands",
    "SelfExtend",
    "StoppingCriteriaList",
    "Tova",
    "Window",
    "__version__",
]

_LAZY = {
    "cache": ("LlamaCache", "LlamaDiskCache", "LlamaRAMCache"),
    "llama": ("Llama",),
    "sampling": ("LogitsProcessorList", "MinTokensLogitsProcessor", "StoppingCriteriaList"),
    "state": ("LlamaState",),
}


def __getattr__(name: str) -> Any:
    # These load the native library; the methods and `pylongctx doctor` must work without it.
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"pylongctx.{module}"), name)
    raise AttributeError(f"module 'pylongctx' has no attribute {name!r}")
