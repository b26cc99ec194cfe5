"""Middleware that requires a login for the page.

Gradio requires a login on some of its routes but not on others, such as those of endless streams.
Here every path is denied except those that the login page itself needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from mbpa.serve.middleware import refuse

PUBLIC_PATHS = frozenset({"", "/", "/theme.css"})
"""Paths, relative to the page's, that need no login for GET and HEAD."""
PUBLIC_FOLDERS = ("/assets/", "/static/")
"""Folders of Gradio's own scripts, styles and fonts, which reveal nothing about the run."""
LOGIN_PATHS = frozenset({"/login", "/login/"})
"""Paths that accept a password by POST."""


class LoginMiddleware:
    """Refuses requests below a path with 401 unless the visitor has logged in.

    Args:
        path: path of the page, without a trailing slash.
        is_known: returns whether cookies belong to a visitor who has logged in.
    """

    def __init__(
        self, app: ASGIApp, path: str, is_known: Callable[[Mapping[str, str]], bool]
    ) -> None:
        self._app, self._path, self._is_known = app, path, is_known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "log in first"})
        else:
            await refuse(send, 401, f"log in at {self._path}")

    def _may_pass(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path != self._path and not path.startswith(f"{self._path}/"):
            return True
        return _is_open(scope, path.removeprefix(self._path)) or self._is_known(
            HTTPConnection(scope).cookies
        )


def _is_open(scope: Scope, path: str) -> bool:
    method = scope.get("method")
    if method == "POST":
        return path in LOGIN_PATHS
    return method in ("GET", "HEAD") and (path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDERS))
