"""Training-free long context for GGUF models, with the API of llama_cpp.Llama."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pylongctx.methods import LongHeads
from pylongctx.methods import positions as _positions
from pylongctx.methods import rules as _rules
from pylongctx.methods.positions import *  # noqa: F403 - what its __all__ names
from pylongctx.methods.rules import *  # noqa: F403

if TYPE_CHECKING:
    from pylongctx.chat import register_chat_completion_handler, unregister_chat_completion_handler
    from pylongctx.completions.grammar import LlamaGrammar
    from pylongctx.drafts.model import ModelDraft, MtpDraft
    from pylongctx.drafts.ngrams import NgramCacheDraft, NgramDraft, NgramModDraft
    from pylongctx.drafts.speculative import DraftChain, LlamaDraftModel, LlamaPromptLookupDecoding, SelfDraft
    from pylongctx.engine.documents import Document
    from pylongctx.engine.sampling.sampler import (
        LogitsProcessor,
        LogitsProcessorList,
        MinTokensLogitsProcessor,
        StoppingCriteria,
        StoppingCriteriaList,
    )
    from pylongctx.engine.saved_state import BaseLlamaCache, LlamaCache, LlamaDiskCache, LlamaRAMCache, LlamaState
    from pylongctx.llama import Llama, LlamaTokenizer
    from pylongctx.parallel import AsyncLlama

__version__ = "0.1.0"
__all__ = [
    "AsyncLlama",
    "BaseLlamaCache",
    "Document",
    "DraftChain",
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaDraftModel",
    "LlamaGrammar",
    "LlamaPromptLookupDecoding",
    "LlamaRAMCache",
    "LlamaState",
    "LlamaTokenizer",
    "LogitsProcessor",
    "LogitsProcessorList",
    "LongHeads",
    "MinTokensLogitsProcessor",
    "ModelDraft",
    "MtpDraft",
    "NgramCacheDraft",
    "NgramDraft",
    "NgramModDraft",
    "SelfDraft",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "__version__",
    "register_chat_completion_handler",
    "unregister_chat_completion_handler",
]
__all__ += _positions.__all__
__all__ += _rules.__all__

_LAZY = {
    "parallel": ("AsyncLlama",),
    "engine.documents": ("Document",),
    "engine.saved_state": ("BaseLlamaCache", "LlamaCache", "LlamaDiskCache", "LlamaRAMCache", "LlamaState"),
    "chat": ("register_chat_completion_handler", "unregister_chat_completion_handler"),
    "completions.grammar": ("LlamaGrammar",),
    "llama": ("Llama", "LlamaTokenizer"),
    "engine.sampling.sampler": (
        "LogitsProcessor",
        "LogitsProcessorList",
        "MinTokensLogitsProcessor",
        "StoppingCriteria",
        "StoppingCriteriaList",
    ),
    "drafts.model": ("ModelDraft", "MtpDraft"),
    "drafts.ngrams": ("NgramCacheDraft", "NgramDraft", "NgramModDraft"),
    "drafts.speculative": ("DraftChain", "LlamaDraftModel", "LlamaPromptLookupDecoding", "SelfDraft"),
}


def __getattr__(name: str) -> Any:
    # These load the native library; the methods and `pylongctx doctor` must work without it.
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"pylongctx.{module}"), name)
    raise AttributeError(f"module 'pylongctx' has no attribute {name!r}")
