"""Training-free long context for GGUF models, with the API of llama_cpp.Llama."""

from typing import TYPE_CHECKING, Any

from pylongctx.methods import Full, SelfExtend, Window

if TYPE_CHECKING:
    from pylongctx.llama import Llama

__version__ = "0.1.0"
__all__ = ["Full", "Llama", "SelfExtend", "Window", "__version__"]


def __getattr__(name: str) -> Any:
    # Llama loads the native library; the methods and `pylongctx doctor` must work without it.
    if name != "Llama":
        raise AttributeError(f"module 'pylongctx' has no attribute {name!r}")
    from pylongctx.llama import Llama

    return Llama
