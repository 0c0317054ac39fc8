"""A folder of static files, and a prefix of all paths."""

from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from pylongctx.serve.errors import ApiError
from pylongctx.serve.gate import as_response

INDEX = "index.html"


def add_folder(app: FastAPI, folder: Path) -> frozenset[str]:
    """Serve the files of a folder where the app has no route; returns the paths of existing files."""
    routes = {getattr(route, "path", "") for route in app.routes}
    names = {f"/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()}
    pages = {name.removesuffix(INDEX) for name in names if name.endswith(f"/{INDEX}")}
    app.mount("/", StaticFiles(directory=folder, html=True), name="files")
    return frozenset((names | pages) - routes)


class Prefix:
    """Removes a prefix from the paths of requests; other paths are not found.

    Parameters
    ----------
    app : ASGI application
        The application.
    prefix : str
        It begins with a slash and does not end with one.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if not path.startswith(f"{self._prefix}/"):
            reason = ApiError(
                404, "not_found_error", f"paths of this server begin with {self._prefix}: {path} does not"
            )
            await as_response(reason, path)(scope, receive, send)
            return
        short = path.removeprefix(self._prefix)
        raw = scope["raw_path"].removeprefix(self._prefix.encode())
        await self._app({**scope, "path": short, "raw_path": raw}, receive, send)
