"""Sequences in files: POST /slots/{seq} with action=save and action=restore."""

import asyncio
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

from pylongctx._lib import error, lib
from pylongctx.engine.identity import difference
from pylongctx.engine.idle import Snapshot
from pylongctx.engine.saved_state import LlamaState
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.service import Service

NAME = re.compile(r"[\w-][\w.-]{0,127}", re.ASCII)


class SlotFiles:
    """The files of one user.

    Parameters
    ----------
    service : Service
        Has the folder.
    owner : str or None
        The owner of the request; each has a separate folder.

    Raises
    ------
    ApiError
        When the server has no folder for sequences.
    """

    def __init__(self, service: Service, owner: str | None) -> None:
        folder = service.settings.slot_folder
        if folder is None:
            raise ApiError(
                501, "not_supported_error", "this server does not save sequences: start it with --slot-save-path"
            )
        self._service = service
        self._owner = owner
        self._folder = folder / owner if owner else folder

    async def save(self, seq: int, name: str) -> dict[str, Any]:
        """Save an idle sequence to a file."""
        path, began = self._path(name), time.monotonic()
        saved = await self._service.between_steps(self._service.engine.save(seq, self._owner))
        await self._threaded(partial(self._write, path, saved))
        found = {"id_slot": seq, "filename": name, "n_saved": len(saved[0]), "n_written": path.stat().st_size}
        return found | {"timings": {"save_ms": 1000 * (time.monotonic() - began)}}

    async def restore(self, seq: int, name: str) -> dict[str, Any]:
        """Restore an idle sequence from a file."""
        path, began = self._path(name), time.monotonic()
        if not path.is_file():
            raise invalid(f"there is no saved sequence {name!r}", "filename")
        state = await self._threaded(partial(self._read, path))
        saved = state.input_ids, state.logits, state.llama_state
        n = await self._service.between_steps(self._service.engine.load(seq, self._owner, saved))
        found = {"id_slot": seq, "filename": name, "n_restored": n, "n_read": path.stat().st_size}
        return found | {"timings": {"restore_ms": 1000 * (time.monotonic() - began)}}

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise invalid(
                "filename must consist of letters, digits, '.', '_' and '-', and not begin with '.'", "filename"
            )
        return self._folder / name

    def _write(self, path: Path, saved: Snapshot) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        LlamaState(*saved, self._service.host.identity).save(path)

    def _read(self, path: Path) -> LlamaState:
        state = LlamaState.load(path)
        if reason := difference(state.identity, self._service.host.identity):
            raise error(lib.LCTX_INVALID, f"the saved state does not fit: {reason}")
        return state

    async def _threaded(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._service.pool, function)
