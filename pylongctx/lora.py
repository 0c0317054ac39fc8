"""LoRA adapters: loaded beside a model, with a scale each."""

import os
from collections.abc import Mapping
from typing import Any

from pylongctx._gguf import check_adapter
from pylongctx._lib import error, ffi, lib, text
from pylongctx._model import Model
from pylongctx._saving import Saving
from pylongctx.state import file_sample


class Adapter:
    """Owner of one ``lctx_adapter``; must be closed before its model.

    Parameters
    ----------
    model : Model
        The model that it adapts.
    path : str
        GGUF file of an adapter, as llama.cpp's convert_lora_to_gguf.py writes it.

    Raises
    ------
    ValueError
        When the file is missing, damaged or for another model.
    """

    def __init__(self, model: Model, path: str) -> None:
        if not os.path.exists(path):
            raise ValueError(f"LoRA path does not exist: {path}")
        check_adapter(path)
        self.handle = lib.lctx_adapter_load(model.handle, os.fsencode(path))
        if failure := text(lib.lctx_adapter_error(self.handle)):
            self.close()
            raise error(lib.LCTX_INVALID, f"{path} cannot be used as LoRA adapter: {failure}")
        self.sample = file_sample(path)
        self.scale = 1.0

    def close(self) -> None:
        """Free the adapter."""
        handle, self.handle = self.handle, ffi.NULL
        lib.lctx_adapter_free(handle)


class Adapters(Saving):
    """What Llama does with LoRA adapters. A change forgets all tokens, which were evaluated with other weights."""

    _adapters: dict[str, Adapter]

    @property
    def loras(self) -> Mapping[str, float]:
        """The adapters in use: path and scale."""
        return {path: adapter.scale for path, adapter in self._adapters.items()}

    def add_lora(self, path: str | os.PathLike[str], scale: float = 1.0) -> None:
        """Use an adapter, or give one that is in use another scale.

        Raises
        ------
        ValueError
            When the file is no adapter of this model, or the scale not finite; nothing changed then.
        """
        name, session = os.fspath(path), self._session
        with session.lock:
            new = name not in self._adapters
            adapter = Adapter(self._model, name) if new else self._adapters[name]
            before, adapter.scale = adapter.scale, float(scale)
            try:
                self._use(self._adapters | {name: adapter})
            except BaseException:
                adapter.scale = before
                if new:
                    adapter.close()
                raise
            self._adapters[name] = adapter

    def remove_lora(self, path: str | os.PathLike[str]) -> None:
        """Use an adapter no more; KeyError when it was not in use."""
        session = self._session
        with session.lock:
            adapter = self._adapters.pop(os.fspath(path))
            self._use(self._adapters)
            adapter.close()

    def _use(self, adapters: dict[str, Adapter]) -> None:
        context = self._session.context
        context.set_adapters([(adapter.handle, adapter.scale) for adapter in adapters.values()])
        self._session.clear()

    @property
    def _identity(self) -> Mapping[str, Any]:
        if not self._adapters:
            return super()._identity
        used = sorted(f"{adapter.sample} * {adapter.scale}" for adapter in self._adapters.values())
        return {**super()._identity, "lora": used}
