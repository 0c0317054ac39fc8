"""Routes with information about the server and its model, and for its sequences."""

import asyncio
import re
import time
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from pylongctx._enums import OVERFLOWS
from pylongctx._lib import error, lib
from pylongctx.engine.compress import compression_prefills
from pylongctx.engine.identity import difference
from pylongctx.engine.saved_state import LlamaState
from pylongctx.engine.slots import Slot, Snapshot
from pylongctx.serve import metrics, native
from pylongctx.serve.bodies import SlotBody, owner_of, read
from pylongctx.serve.cards import MODALITIES
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.service import Service
from pylongctx.serve.texts import token_text

SLOT_FILE = re.compile(r"[\w-][\w.-]{0,127}", re.ASCII)
STARTED = "Process-Start-Time-Unix"  # llama-server's header of /metrics
PATIENCE = 0.5  # seconds between two looks at whether a client is still there


class SlotFiles:
    """The files of one owner of requests; each has a separate folder. ApiError when the server has no folder."""

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
        await self._service.in_thread(self._write, path, saved)
        found = {"id_slot": seq, "filename": name, "n_saved": len(saved[0]), "n_written": path.stat().st_size}
        return found | {"timings": {"save_ms": 1000 * (time.monotonic() - began)}}

    async def restore(self, seq: int, name: str) -> dict[str, Any]:
        """Restore an idle sequence from a file."""
        path, began = self._path(name), time.monotonic()
        if not path.is_file():
            raise invalid(f"there is no saved sequence {name!r}", "filename")
        state = await self._service.in_thread(self._read, path)
        saved = state.input_ids, state.logits, state.llama_state
        n = await self._service.between_steps(self._service.engine.load(seq, self._owner, saved))
        found = {"id_slot": seq, "filename": name, "n_restored": n, "n_read": path.stat().st_size}
        return found | {"timings": {"restore_ms": 1000 * (time.monotonic() - began)}}

    def _path(self, name: str) -> Path:
        if not SLOT_FILE.fullmatch(name):
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


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    api = APIRouter()
    engine = service.engine

    @api.get("/health", summary="Health of the server; needs no key")
    @api.get("/v1/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        service.check_engine()
        return {"status": "ok"}

    @api.get("/v1/models", summary="The model of this server")
    @api.get("/models", include_in_schema=False)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @api.get("/v1/models/{name:path}", summary="The model by name; 404 for other names")
    async def model(name: str) -> dict[str, Any]:
        if name not in (service.settings.alias, *service.settings.aliases):
            raise ApiError(
                404, "not_found_error", f"this server only has the model {service.settings.alias!r}", "model"
            )
        return _model(service)

    @api.get("/props", summary="Settings, sampling defaults and the chat template")
    async def props() -> dict[str, Any]:
        return _props(service)

    @api.get("/slots", summary="State and content of all sequences")
    async def slots() -> list[dict[str, Any]]:
        if not service.settings.slots:
            raise ApiError(501, "not_supported_error", "this server was started with --no-slots")
        return [_slot(service, slot) for slot in engine.slots]

    @api.post("/slots/{seq}", summary="Erase or compress a sequence; with --slot-save-path save or restore it")
    async def act(request: Request, seq: int, action: str = "erase") -> dict[str, Any]:
        return await _act(service, request, seq, action)

    @api.get("/metrics", summary="Counts and gauges for Prometheus")
    async def numbers() -> Response:
        page = metrics.page(service, await service.kv_bytes())
        return Response(page, headers={STARTED: str(service.started)}, media_type=metrics.TYPE)

    @api.get("/v1/longctx", summary="Method, KV memory, and with id=ANSWER the chunks that were read for it")
    async def longctx(id: str | None = None) -> dict[str, Any]:
        return await service.between_steps(engine.call(lambda: _longctx(service, id)))

    return api


async def _act(service: Service, request: Request, seq: int, action: str) -> dict[str, Any]:
    """Do what a client wants of an idle sequence."""
    n_seq, owner = service.host.n_seq, owner_of(request)
    if not 0 <= seq < n_seq:
        raise invalid(f"the sequence must be from 0 to {n_seq - 1}, not {seq}", "id_slot")
    if action == "erase":
        return {"id_slot": seq, "n_erased": await service.between_steps(service.engine.erase(seq, owner))}
    if action not in ("compress", "save", "restore"):
        raise invalid(f"action must be erase, compress, save or restore, not {action!r}", "action")
    body = await read(request, SlotBody)
    if action == "compress":
        return await _compress(service, request, seq, body)
    files = SlotFiles(service, owner)
    with service.admitted():
        return await (files.save if action == "save" else files.restore)(seq, body.filename or "")


async def _compress(service: Service, request: Request, seq: int, body: SlotBody) -> dict[str, Any]:
    """Compress a sequence; it stays as it was when the client leaves before the end."""
    if body.ratio is None:
        raise invalid("compress needs a ratio, the fraction of the KV entries to keep", "ratio")
    future = service.engine.compress(body.ratio, seq, owner_of(request), body.answer)
    with service.admitted():
        done = asyncio.ensure_future(service.between_steps(future))
        while not (await asyncio.wait([done], timeout=PATIENCE))[0]:
            if await request.is_disconnected() and not future.cancel():
                service.engine.stop_compression()
    report = done.result()
    change = report.divergence if report.divergence is not None and isfinite(report.divergence) else None
    return {"id_slot": seq, **asdict(report), "divergence": change, "drifts": report.drifts}


def _model(service: Service) -> dict[str, Any]:
    host, info = service.host, service.host.model.info
    return {
        "id": service.settings.alias,
        "aliases": [service.settings.alias, *service.settings.aliases],
        "tags": service.settings.tags,
        "object": "model",
        "created": service.started,
        "owned_by": "pylongctx",
        "architecture": MODALITIES,
        "meta": {
            "n_vocab": info.n_vocab,
            "n_ctx": host.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.size,
            "method": str(host.method) if host.method else None,
        },
    }


def _props(service: Service) -> dict[str, Any]:
    host = service.host
    info = host.model.info
    params = native.settings(service.sampling_params()) | {"n_predict": service.settings.n_predict or -1}
    return {
        "default_generation_settings": {"id": 0, "n_ctx": host.n_ctx, "speculative": False, "params": params},
        "total_slots": host.n_seq,
        "model_alias": service.settings.alias,
        "model_path": host.model_path,
        "chat_template": host.templates.template.info["source"],
        "bos_token": token_text(service, info.token_bos),
        "eos_token": token_text(service, info.token_eos),
        "modalities": {"vision": False, "audio": False},
        "endpoint_slots": service.settings.slots,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "is_sleeping": False,  # a server of models says when one sleeps
        "build_info": service.fingerprint,
    }


def _slot(service: Service, slot: Slot) -> dict[str, Any]:
    job = slot.job or slot.last
    found: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": service.host.n_ctx,
        "speculative": False,
        "is_processing": slot.job is not None,
        "n_past": slot.session.n_tokens,
    }
    if job is not None:
        n_remain = -1 if slot.job is None or job.limit is None else job.limit - job.n_generated
        n_decoded = 0 if slot.job is None else job.n_generated
        token = {"has_next_token": slot.job is not None, "n_remain": n_remain, "n_decoded": n_decoded}
        found |= {
            "n_prompt_tokens": len(job.tokens),
            "n_prompt_tokens_processed": job.n_read,
            "n_prompt_tokens_cache": job.n_cached,
            "n_prompt_tokens_stored": job.n_stored,
            "n_tokens_dropped": job.dropped_tokens,
            "next_token": [token],
        }
    return found


def _longctx(service: Service, id: str | None) -> dict[str, Any]:
    host, engine = service.host, service.engine
    usage = host.session.context.kv_usage() if host.method else None
    compresses = host.method is not None and host.method.replays
    return {
        "method": str(host.method) if host.method else None,
        "why": host.session.context.why,
        "n_ctx": host.n_ctx,
        "n_ctx_train": host.model.info.n_ctx_train,
        "overflow": OVERFLOWS[host.session.evicts],
        "compresses": compresses,
        "compression_prefills": compression_prefills(host.method) if host.method and compresses else None,
        "kv": usage and usage.sizes(),
        "store": host.store and host.store.facts(),
        "sequences": [_slot(service, slot) | {"kv_rows": _rows(service, slot)} for slot in engine.slots],
        "chunk_map": engine.tracer.chunk_map(id),
        "id_slot": next(
            (slot.id for slot in engine.slots if id and slot.last is not None and slot.last.id == id), None
        ),
    }


def _rows(service: Service, slot: Slot) -> int:
    """Return the KV entries that a sequence holds in all layers and heads."""
    info, context = service.host.model.info, slot.session.context
    return sum(context.n_held(slot.id, layer, head) for layer in range(info.n_layer) for head in range(info.n_head_kv))
