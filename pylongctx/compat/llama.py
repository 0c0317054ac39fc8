"""The replacement of llama_cpp.Llama."""

import os
from contextlib import ExitStack
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pylongctx.llama
from pylongctx._lib import ffi, lib
from pylongctx.methods import Method


class Llama(pylongctx.llama.Llama):
    """``pylongctx.Llama`` with the internals of ``llama_cpp.Llama`` that programs use.

    Since programs may change the KV cache through ``ctx``, reading it makes this object evaluate its tokens again
    before it continues.
    """

    default_method: Method | None = None

    def __init__(self, model_path: str, **arguments: Any) -> None:
        if "method" not in arguments and not arguments.get("embedding"):
            chosen = self.default_method or os.environ.get("LCTX_METHOD")
            arguments |= {"method": chosen} if chosen else {}
        self._vocab_only = bool(arguments.get("vocab_only"))
        self._contexts = ExitStack()  # contexts of llama_cpp's objects, closed before the model
        super().__init__(model_path, **arguments)

    def close(self) -> None:
        """Free the contexts of llama_cpp's objects, then the context and the model."""
        self._contexts.close()
        super().close()

    @property
    def model(self) -> int:
        """The ``llama_model *`` for llama_cpp's C functions."""
        return _address(lib.lctx_model_llama(self._model.handle))

    @property
    def ctx(self) -> int:
        """The ``llama_context *`` for llama_cpp's C functions."""
        self.session.shared = True
        return _address(lib.lctx_context_llama(self.session.context.handle))

    @property
    def _ctx(self) -> Any:
        """llama_cpp's object around ``ctx``; it does not own it. With ``vocab_only`` it has its own context."""
        llama_cpp, wrapper = import_module("llama_cpp"), import_module("llama_cpp._internals").LlamaContext
        if self._vocab_only:
            model = SimpleNamespace(model=self.model, _exit_stack=self._contexts, owner=self)
            return wrapper(model=model, params=llama_cpp.llama_context_default_params())
        found, ctx = wrapper.__new__(wrapper), self.ctx
        memory = llama_cpp.llama_get_memory(ctx)
        vars(found).update(ctx=ctx, memory=memory, params=self.context_params, _exit_stack=ExitStack())
        return found

    @property
    def _is_recurrent(self) -> bool:
        return bool(import_module("llama_cpp").llama_model_is_recurrent(self.model))

    @property
    def _is_hybrid(self) -> bool:
        return bool(import_module("llama_cpp").llama_model_is_hybrid(self.model))

    @property
    def context_params(self) -> Any:
        """llama_cpp's struct with the sizes of the context, the other fields at llama.cpp's defaults."""
        context = self.session.context
        params = import_module("llama_cpp").llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context.n_ctx, context.n_batch, context.n_ubatch
        params.n_threads, params.n_threads_batch = self.n_threads, self.n_threads_batch
        return params


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))
