"""The HTML of what a model writes, for the page."""

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request

from pylongctx.serve.fields import Fields, read
from pylongctx.serve.markup import writer

MAX_AT_ONCE = 2  # texts; the others wait, and answers of models are not slowed down


class RenderBody(Fields):
    """POST /render."""

    text: str


def routes() -> APIRouter:
    """Return the route."""
    router = APIRouter()
    limiter: list[CapacityLimiter] = []  # made inside the loop that uses it

    @router.post("/render", summary="Markdown, formulas and code as HTML, for the page: a list of blocks")
    async def render(request: Request) -> dict[str, list[str]]:
        body = await read(request, RenderBody)
        if not limiter:
            limiter.append(CapacityLimiter(MAX_AT_ONCE))
        return {"blocks": await to_thread.run_sync(writer.blocks, body.text, limiter=limiter[0])}

    return router
