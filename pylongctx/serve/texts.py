"""Routes for texts and tokens other than completions."""

import base64
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from pylongctx.serve.bodies import ChatBody, DetokenizeBody, EmbeddingsBody, TokenizeBody, as_prompts
from pylongctx.serve.errors import invalid
from pylongctx.serve.fields import read
from pylongctx.serve.generate import rendering
from pylongctx.serve.service import Service

MAX_TEXTS = 2048  # maximum texts per request


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    host = service.host
    info = host.model.info

    @router.post("/tokenize", summary="The tokens of a text")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read(request, TokenizeBody)
        text, special = body.content, body.add_special
        if text is None:
            text, special = body.prompt, body.add_special_tokens
        if text is None:
            raise invalid("send the text as content or prompt", "content")
        tokens = await service.threaded(partial(_tokens, service, text, special, body.parse_special))
        found = [_with_piece(service, token) for token in tokens] if body.with_pieces else tokens
        return {"tokens": found, "count": len(tokens), "max_model_len": host.n_ctx}

    @router.post("/detokenize", summary="The text of tokens")
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read(request, DetokenizeBody)
        found = await service.threaded(partial(host.model.detokenize, body.tokens, special=True))
        text = found.decode("utf-8", "replace")
        return {"content": text, "prompt": text}

    @router.get("/tokenizer_info", summary="The special tokens, for lm-evaluation-harness")
    async def tokenizer_info() -> dict[str, Any]:
        return {
            "tokenizer_class": host.metadata.get("tokenizer.ggml.model"),
            "vocab_size": info.n_vocab,
            "bos_token": token_text(service, info.token_bos),
            "eos_token": token_text(service, info.token_eos),
            "add_bos_token": bool(info.add_bos),
            "chat_template": host.templates.template.info["source"],
        }

    @router.post("/apply-template", summary="The prompt of a conversation")
    async def apply_template(request: Request) -> dict[str, str]:
        body = await read(request, ChatBody)
        given = body.template(service.settings.template, host)
        completer = rendering(service, request, body).completer()
        return {"prompt": await service.threaded(partial(completer.apply_template, body.messages, **given))}

    @router.post("/v1/embeddings", summary="Vectors of texts of length 1, with --embeddings")
    async def embeddings(request: Request) -> Response:
        body = await read(request, EmbeddingsBody)
        if body.encoding_format not in ("float", "base64"):
            raise invalid(f"encoding_format must be float or base64, not {body.encoding_format!r}", "encoding_format")
        found = await service.threaded(partial(_embed, service, body))
        if body.encoding_format == "base64":
            for one in found["data"]:
                one["embedding"] = base64.b64encode(np.array(one["embedding"], np.float32).tobytes()).decode()
        return JSONResponse(found)

    @router.post("/embedding", summary="Vectors of texts, in llama-server's form")
    @router.post("/embeddings", include_in_schema=False)
    async def embedding(request: Request) -> Response:
        body = await read(request, EmbeddingsBody)
        data = (await service.threaded(partial(_embed, service, body)))["data"]
        return JSONResponse([{"index": one["index"], "embedding": [one["embedding"]]} for one in data])

    return router


def token_text(service: Service, token: int) -> str:
    """Return the text of a token; "" for none."""
    return service.host.model.piece(token, True).decode("utf-8", "replace") if token >= 0 else ""


def _tokens(service: Service, text: str, special: bool, parse_special: bool) -> list[int]:
    service.host.session.check_size(len(text.encode()))
    return service.host.model.tokenize(text.encode(), special, parse_special)


def _with_piece(service: Service, token: int) -> dict[str, Any]:
    """Return a token with its text, or with its bytes if they are part of a character."""
    piece = service.host.model.piece(token, True)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}


def _embed(service: Service, body: EmbeddingsBody) -> Any:
    """Return OpenAI's response of embeddings."""
    embedder = service.vectors()
    if body.embd_normalize not in (-1, 2):
        raise invalid(
            f"embd_normalize must be 2 (length 1) or -1 (unchanged), not {body.embd_normalize}", "embd_normalize"
        )
    texts = [service.host.plain(prompt) for prompt in as_prompts(body.input, MAX_TEXTS, "input")[0]]
    embed, normalize = embedder.response, body.embd_normalize == 2
    return embed(texts, service.settings.alias, body.dimensions, normalize=normalize, truncate=False)  # type: ignore[arg-type]
