"""LoRA adapters, loaded in addition to a model, each with a scale."""

import os
from contextlib import suppress

from pylongctx._lib import error, ffi, lib, text
from pylongctx.engine.model import Model
from pylongctx.engine.session import Session
from pylongctx.errors import InvalidInput
from pylongctx.model_files.digests import check_unchanged, digest_of, stats
from pylongctx.model_files.gguf import check_adapter


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
        found = stats([path])
        self.handle = lib.lctx_adapter_load(model.handle, os.fsencode(path))
        if failure := text(lib.lctx_adapter_error(self.handle)):
            self.close()
            raise error(lib.LCTX_INVALID, f"{path} cannot be used as a LoRA adapter: {failure}")
        self.scale = 1.0
        self._place, self._found = os.path.realpath(path), found[0]
        try:
            self.digest = digest_of([path])
            check_unchanged([path], found)
        except InvalidInput:
            self.close()
            raise

    def is_at(self, path: str) -> bool:
        """Return True if a path leads to the adapter's file."""
        with suppress(OSError):
            return os.path.realpath(path) == self._place or os.path.samestat(os.stat(path), self._found)
        return False

    def close(self) -> None:
        """Free the adapter."""
        handle, self.handle = self.handle, ffi.NULL
        lib.lctx_adapter_free(handle)


class Adapters:
    """The LoRA adapters in use. A change removes all tokens, which were evaluated with other weights.

    Parameters
    ----------
    model : Model
        The model that they adapt.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._used: dict[str, Adapter] = {}

    @property
    def scales(self) -> dict[str, float]:
        """The adapters in use: path and scale."""
        return {path: adapter.scale for path, adapter in self._used.items()}

    @property
    def identity(self) -> list[str]:
        """The adapters' part of the identity of saved states."""
        return sorted(f"{adapter.digest} * {adapter.scale}" for adapter in self._used.values())

    def add(self, session: Session, path: str, scale: float) -> None:
        """Use an adapter, or change the scale of one in use; nothing changes when it is refused."""
        with session.lock:
            path = self._spelled(path)
            new = path not in self._used
            adapter = Adapter(self._model, path) if new else self._used[path]
            before, adapter.scale = adapter.scale, float(scale)
            try:
                self._use(session, self._used | {path: adapter})
            except BaseException:
                adapter.scale = before
                if new:
                    adapter.close()
                raise
            self._used[path] = adapter

    def remove(self, session: Session, path: str) -> None:
        """Stop using an adapter; KeyError when it is not in use."""
        with session.lock:
            adapter = self._used.pop(self._spelled(path))
            self._use(session, self._used)
            adapter.close()

    def close(self) -> None:
        """Free all adapters; must be called before the model is freed."""
        while self._used:
            self._used.popitem()[1].close()

    def _spelled(self, path: str) -> str:
        """Return the path under which a file is in use; for an unused file the path itself."""
        return next((used for used, adapter in self._used.items() if adapter.is_at(path)), path)

    def _use(self, session: Session, adapters: dict[str, Adapter]) -> None:
        session.context.set_adapters([(adapter.handle, adapter.scale) for adapter in adapters.values()])
        session.clear()
