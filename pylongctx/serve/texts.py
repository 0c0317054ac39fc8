"""Routes for texts and tokens other than completions: tokens, quotes, embeddings, reranking."""

import base64
import re
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from pylongctx.chat.asking import quotes
from pylongctx.completions.embeddings import Embedder
from pylongctx.parallel import Host
from pylongctx.readers.files import FileText
from pylongctx.serve.bodies import ChatBody, DetokenizeBody, EmbeddingsBody, Fields, TokenizeBody, as_prompts, read
from pylongctx.serve.errors import invalid
from pylongctx.serve.openai import template_completer
from pylongctx.serve.service import Service

MAX_DOCUMENTS = 2048
RERANK_FIELD = re.compile(r"\{(query|document)\}")
RERANK_TEMPLATE = "tokenizer.chat_template.rerank"  # a model's own template for a query and a document
MAX_TEXTS = 2048  # maximum texts per request
MAX_QUOTES = 20


class RerankBody(Fields):
    """POST /rerank, in the form of Jina and Cohere (``documents``) or of TEI (``texts``)."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    return_text: bool | None = None

    def given(self) -> list[str]:
        """Return the texts of the documents."""
        found = [_text(i, one) for i, one in enumerate(self.documents or self.texts or ())]
        if not found:
            raise invalid("documents must be a list of at least one text", "documents")
        if len(found) > MAX_DOCUMENTS:
            raise invalid(f"one request may have at most {MAX_DOCUMENTS} documents, not {len(found)}", "documents")
        return found


class NamedText(Fields):
    """A file that a question is about."""

    name: str
    text: str


class QuotesBody(Fields):
    """POST /v1/longctx/quotes: files, a question about them, and what was answered."""

    files: list[NamedText]
    question: str
    answer: str
    n: int = Field(3, ge=1, le=MAX_QUOTES)

    def found(self) -> list[dict[str, Any]]:
        """Return the passages, best first."""
        files = [FileText(one.name, one.text) for one in self.files]
        return [asdict(one) for one in quotes(files, self.question, self.answer, self.n)]


def _text(i: int, document: Any) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise invalid(f"documents[{i}] must be a text, or an object with one", "documents")
    return text


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    api = APIRouter()
    _add_texts(api, service)
    _add_vectors(api, service)
    return api


def _add_texts(api: APIRouter, service: Service) -> None:
    """Add what a tokenizer, a template and a text answer."""
    host = service.host
    info = host.model.info

    @api.post("/tokenize", summary="The tokens of a text")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read(request, TokenizeBody)
        text, special = body.content, body.add_special
        if text is None:
            text, special = body.prompt, body.add_special_tokens
        if text is None:
            raise invalid("send the text as content or prompt", "content")
        tokens = await service.threaded(_tokens, service, text, special, body.parse_special)
        found = [_with_piece(service, token) for token in tokens] if body.with_pieces else tokens
        return {"tokens": found, "count": len(tokens), "max_model_len": host.n_ctx}

    @api.post("/detokenize", summary="The text of tokens")
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read(request, DetokenizeBody)
        found = await service.threaded(host.model.detokenize, body.tokens, special=True)
        text = found.decode("utf-8", "replace")
        return {"content": text, "prompt": text}

    @api.get("/tokenizer_info", summary="The special tokens, for lm-evaluation-harness")
    async def tokenizer_info() -> dict[str, Any]:
        return {
            "tokenizer_class": host.metadata.get("tokenizer.ggml.model"),
            "vocab_size": info.n_vocab,
            "bos_token": token_text(service, info.token_bos),
            "eos_token": token_text(service, info.token_eos),
            "add_bos_token": bool(info.add_bos),
            "chat_template": host.templates.template.info["source"],
        }

    @api.post("/apply-template", summary="The prompt of a conversation")
    async def apply_template(request: Request) -> dict[str, str]:
        body = await read(request, ChatBody)
        given = body.template(service.settings.template, host)
        completer = template_completer(service, request, body)
        return {"prompt": await service.threaded(completer.apply_template, body.messages, **given)}

    @api.post("/v1/longctx/quotes", summary="The sentences of files that an answer rests on, with their lines")
    async def quote(request: Request) -> dict[str, Any]:
        body = await read(request, QuotesBody)
        return {"quotes": await service.threaded(body.found)}


def _add_vectors(api: APIRouter, service: Service) -> None:
    """Add what models for embeddings and reranking answer."""

    @api.post("/v1/embeddings", summary="Vectors of texts of length 1, with --embeddings")
    async def embeddings(request: Request) -> Response:
        body = await read(request, EmbeddingsBody)
        if body.encoding_format not in ("float", "base64"):
            raise invalid(f"encoding_format must be float or base64, not {body.encoding_format!r}", "encoding_format")
        found = await service.threaded(_embed, service, body)
        if body.encoding_format == "base64":
            for one in found["data"]:
                one["embedding"] = base64.b64encode(np.array(one["embedding"], np.float32).tobytes()).decode()
        return JSONResponse(found)

    @api.post("/embedding", summary="Vectors of texts, in llama-server's form")
    @api.post("/embeddings", include_in_schema=False)
    async def embedding(request: Request) -> Response:
        body = await read(request, EmbeddingsBody)
        data = (await service.threaded(_embed, service, body))["data"]
        return JSONResponse([{"index": one["index"], "embedding": [one["embedding"]]} for one in data])

    @api.post("/v1/rerank", summary="Documents by relevance to a query, with --reranking")
    @api.post("/v2/rerank", include_in_schema=False)
    @api.post("/v1/reranking", include_in_schema=False)
    @api.post("/rerank", include_in_schema=False)
    @api.post("/reranking", include_in_schema=False)
    async def rerank(request: Request) -> Response:
        embedder, body = service.ranker(), await read(request, RerankBody)
        return JSONResponse(await service.threaded(_rank, service, embedder, body))


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


def _rank(service: Service, embedder: Embedder, body: RerankBody) -> Any:
    """Return the response, best documents first."""
    documents = body.given()
    tokens = [pair_tokens(service.host, body.query, document) for document in documents]
    scores, n_tokens = embedder.embed(tokens, truncate=False)
    order = sorted(range(len(documents)), key=lambda i: -scores[i][0])[: body.top_n]
    if body.texts is not None:
        return [_result(i, "score", scores[i][0], "text", documents[i] if body.return_text else None) for i in order]
    shown = {i: {"text": documents[i]} if body.return_documents else None for i in order}
    results = [_result(i, "relevance_score", scores[i][0], "document", shown[i]) for i in order]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"model": service.settings.alias, "object": "list", "usage": usage, "results": results}


def _result(i: int, name: str, score: float, more: str, document: Any) -> dict[str, Any]:
    return {"index": i, name: score} | ({} if document is None else {more: document})


def pair_tokens(host: Host, query: str, document: str) -> list[int]:
    """Return the tokens of a query and a document in the form that the model was trained on."""
    if template := host.metadata.get(RERANK_TEMPLATE):
        texts = {"query": query, "document": document}
        return host.tokens(RERANK_FIELD.sub(lambda found: texts[found[1]], template))
    info = host.model.info
    end = [info.token_eos if info.token_eos >= 0 else info.token_sep] if info.add_eos else []
    middle = [*end, *([info.token_sep] if info.add_sep else [])]
    return [*host.model.start, *host.tokens(query, False), *middle, *host.tokens(document, False), *end]
