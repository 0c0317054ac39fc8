"""Reranking of documents by relevance to a query, for models trained for it."""

import re
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from pylongctx.completions.embeddings import Embedder
from pylongctx.parallel.host import Host
from pylongctx.serve.errors import invalid
from pylongctx.serve.fields import Fields, read
from pylongctx.serve.service import Service

MAX_DOCUMENTS = 2048
PLACE = re.compile(r"\{(query|document)\}")
TEMPLATE = "tokenizer.chat_template.rerank"  # a model's own template for a query and a document


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


def _text(i: int, document: Any) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise invalid(f"documents[{i}] must be a text, or an object with one", "documents")
    return text


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/rerank", summary="Documents by relevance to a query, with --reranking")
    @router.post("/v2/rerank", include_in_schema=False)
    @router.post("/v1/reranking", include_in_schema=False)
    @router.post("/rerank", include_in_schema=False)
    @router.post("/reranking", include_in_schema=False)
    async def rerank(request: Request) -> Response:
        embedder, body = service.ranker(), await read(request, RerankBody)
        return JSONResponse(await service.threaded(partial(_rank, service, embedder, body)))

    return router


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
    if template := host.metadata.get(TEMPLATE):
        texts = {"query": query, "document": document}
        return host.tokens(PLACE.sub(lambda found: texts[found[1]], template))
    info = host.model.info
    end = [info.token_eos if info.token_eos >= 0 else info.token_sep] if info.add_eos else []
    middle = [*end, *([info.token_sep] if info.add_sep else [])]
    return [*host.model.start, *host.tokens(query, False), *middle, *host.tokens(document, False), *end]
