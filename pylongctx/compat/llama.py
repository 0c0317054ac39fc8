"""The class that stands in the place of llama_cpp.Llama."""

import os
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import pylongctx.llama
from pylongctx._lib import ffi, lib
from pylongctx.methods import Method


class Llama(pylongctx.llama.Llama):
    """``pylongctx.Llama`` with what programs take from the inside of ``llama_cpp.Llama``.

    Whoever takes ``ctx`` may change the cache through it, so the tokens evaluated so far are evaluated again when this
    object goes on.
    """

    default_method: Method | None = None

    def __init__(self, model_path: str, **arguments: Any) -> None:
        if "method" not in arguments and not arguments.get("embedding"):
            chosen = self.default_method or os.environ.get("LCTX_METHOD")
            arguments |= {"method": chosen} if chosen else {}
        super().__init__(model_path, **arguments)

    @property
    def model(self) -> int:
        """The ``llama_model *`` for llama_cpp's C functions."""
        return _address(lib.lctx_model_llama(self.session.model.handle))

    @property
    def ctx(self) -> int:
        """The ``llama_context *`` for llama_cpp's C functions."""
        self.session.shared = True
        return _address(lib.lctx_context_llama(self.session.context.handle))

    @property
    def _ctx(self) -> Any:
        """llama_cpp's object around ``ctx``; it frees nothing."""
        wrapper, ctx = import_module("llama_cpp._internals").LlamaContext, self.ctx
        found = wrapper.__new__(wrapper)
        memory = import_module("llama_cpp").llama_get_memory(ctx)
        vars(found).update(ctx=ctx, memory=memory, params=self.context_params, _exit_stack=ExitStack())
        return found

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
