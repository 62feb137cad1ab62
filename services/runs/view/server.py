"""The HTTP server of the page: read-only, and for this host alone unless a token is asked for."""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from gspo_services.broker.store import NoLedger, StoreCorrupt
from gspo_services.runs.view.completions import FORMS, CompletionQuery, Encoder, encoder, read_query
from gspo_services.runs.view.page_answers import NotThere, PageAnswers
from gspo_services.runs.view.page_files import TYPES, page_files
from gspo_services.runs.view.table_answers import TableAnswers
from gspo_services.runs.view.watched_run import WatchedRun
from gspo_services.shared.runtime.errors import EndpointError
from gspo_services.shared.runtime.http_listener import listen

COOKIE: Final = "gspo_view"
TOKEN: Final = "token"
MAX_CONNECTIONS: Final = 256
LOCAL_NAMES: Final = re.compile(r"^(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?$")
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Nothing of another origin is loaded or contacted, and text from a run stays text."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewServer:
    """Serves ``runs`` at one address."""

    def __init__(self, runs: Mapping[str, WatchedRun], answers: PageAnswers, token: str) -> None:
        """``token``: what a request must carry, in the address or in the cookie that the address leaves. Empty: requests
        to this host's own names need no token, and no others are answered."""
        self._runs = runs
        self._answers = answers
        self._tables = TableAnswers(runs)
        self._token = token
        self._files, self._release = page_files()
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self.port = 0

    def application(self) -> web.Application:
        """Return the routes. A GET changes nothing; the one POST starts a replay beside the run."""
        app = web.Application(middlewares=[self._guard])
        look = app.router.add_get
        look("/api/runs", self._plain(lambda request: self._answers.runs()))
        look("/api/runs/{run}/overview", self._plain(self._of_run(lambda run, request: self._answers.overview(run))))
        look(
            "/api/runs/{run}/groups",
            self._plain(self._of_run(lambda run, request: self._answers.groups(run, request.query))),
        )
        tables: dict[str, Callable[[WatchedRun, web.Request], Awaitable[Any]]] = {
            "completions": lambda run, request: self._tables.completions(run, request.query),
            "prompts": lambda run, request: self._tables.prompts(run, request.query.getall("id", [])),
            "expected": lambda run, request: self._tables.expected(run, request.query.getall("task", [])),
            "metrics": lambda run, request: self._tables.metrics(run, request.query.getall("name", []), request.query),
            "settings": lambda run, request: self._tables.settings(run),
        }
        for name, answer in tables.items():
            look(f"/api/runs/{{run}}/{name}", self._plain(self._of_run(answer)))
        look("/api/runs/{run}/completions.{form}", self._download)
        look("/api/runs/{run}/trajectories/{id}", self._plain(self._of_run(self._trajectory)))
        look("/api/runs/{run}/tasks/{split}/{id}", self._plain(self._of_run(self._task)))
        look("/api/runs/{run}/learner/{id}", self._plain(self._of_run(self._learned)))
        app.router.add_post("/api/runs/{run}/learner/{id}", self._plain(self._of_run(self._replay)))
        look("/static/{release}/{name}", self._static)
        look("/{rest:.*}", self._index)
        return app

    async def warm(self) -> None:
        """Read ahead what the first page needs."""
        await self._answers.warm()

    async def read_ahead(self) -> None:
        """Index what may be asked for next."""
        await self._tables.read_ahead()

    # --- who may ask --------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer only those who may ask, and never with a traceback."""
        response: web.StreamResponse
        refusal = self._refusal(request)
        if refusal is not None:
            response = refusal
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = self._error(error.status, error.reason)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        given = request.query.get(TOKEN, "")
        if self._token:
            known = given or request.cookies.get(COOKIE, "")
            if not hmac.compare_digest(known.encode("utf-8", "replace"), self._token.encode()):
                return self._error(403, "This page needs the token of the address that `gspo view` has printed.")
            if given and request.method == "GET" and not request.path.startswith("/api/"):
                return self._without_token(request)
        elif not LOCAL_NAMES.match(request.headers.get("Host", "")):
            # DNS rebinding: another site's page whose name points here sends that name.
            return self._error(
                403, "This page answers only to localhost and 127.0.0.1; `gspo view --host` opens it to others."
            )
        if request.method == "POST" and request.headers.get("X-Gspo-View") != "1":
            return self._error(403, "A request from another page is refused.")
        return None

    def _without_token(self, request: web.Request) -> web.StreamResponse:
        """Keep the token in a cookie, and out of the history and of what is seen over a shoulder."""
        query = [(name, value) for name, value in request.query.items() if name != TOKEN]
        # One slash: an address that begins with two is another host's.
        where = "/" + request.path.lstrip("/") + ("?" + urlencode(query) if query else "")
        response = web.Response(status=303, headers={"Location": where})
        response.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict", path="/")
        return response

    # --- answers ------------------------------------------------------------------------------------------------------

    def _plain(self, answer: Callable[[web.Request], Awaitable[Any]]) -> Handler:
        """Return ``answer`` as JSON; an error in the run's files becomes a text for the page."""

        async def handler(request: web.Request) -> web.StreamResponse:
            plain = await self._tried(answer, request)
            if isinstance(plain, web.StreamResponse):
                return plain
            # NaN and infinity become null.
            response = web.Response(body=self._encoded(plain), content_type="application/json")
            if len(response.body or b"") > 1 << 15:  # type: ignore[arg-type]
                response.enable_compression()
            return response

        return handler

    async def _tried(self, answer: Callable[[web.Request], Awaitable[Any]], request: web.Request) -> Any:
        """Return the answer, or a response that says why there is none."""
        try:
            return await answer(request)
        except NotThere as error:
            return self._error(404, str(error))
        except ValueError as error:
            return self._error(409 if isinstance(error, NoLedger) else 400, str(error))
        except (StoreCorrupt, OSError) as error:
            return self._error(409, str(error))

    def _encoded(self, plain: Any) -> bytes:
        try:
            return self._encoder.encode(plain)
        except UnicodeEncodeError:
            return self._encoder.encode(_whole(msgspec.to_builtins(plain, enc_hook=str)))

    def _of_run(
        self, answer: Callable[[WatchedRun, web.Request], Awaitable[Any]]
    ) -> Callable[[web.Request], Awaitable[Any]]:
        async def found(request: web.Request) -> Any:
            name = request.match_info["run"]
            if name not in self._runs:
                raise NotThere(f"there is no run called {name[:100]!r} here; there are {', '.join(self._runs)}")
            return await answer(self._runs[name], request)

        return found

    async def _download(self, request: web.Request) -> web.StreamResponse:
        """Send a file of completions while it is made. What goes wrong on the way ends the connection."""
        form = request.match_info["form"]
        if form not in FORMS:
            return self._error(404, f"completions.{form[:20]}: there are {', '.join(FORMS)}")

        async def begin(run: WatchedRun, request: web.Request) -> tuple[WatchedRun, CompletionQuery, Encoder]:
            query = read_query(request.query)
            components = await self._tables.components(run)
            await run.call(lambda: run.completions.order(query))
            return run, query, encoder(form, components)

        begun = await self._tried(self._of_run(begin), request)
        if isinstance(begun, web.StreamResponse):
            return begun
        run, query, made = begun
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Disposition": f'attachment; filename="{run.name}.{form}"'}
        )
        response.content_type = FORMS[form]
        await response.prepare(request)
        try:
            async for rows in self._tables.blocks(run, query):
                await response.write(made.rows(rows))
            await response.write(made.end())
            await response.write_eof()
        except (NoLedger, StoreCorrupt, OSError, ValueError):
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _trajectory(self, run: WatchedRun, request: web.Request) -> Any:
        return await self._answers.trajectory(run, _id(request))

    async def _task(self, run: WatchedRun, request: web.Request) -> Any:
        split = request.match_info["split"]
        if split not in ("train", "eval"):
            raise NotThere(f"there is no split called {split[:100]!r}: use train or eval")
        return await self._answers.task(run, split, _id(request))

    async def _learned(self, run: WatchedRun, request: web.Request) -> Any:
        return await self._answers.learner_state(run, _id(request))

    async def _replay(self, run: WatchedRun, request: web.Request) -> Any:
        return await self._answers.start_replay(run, _id(request))

    async def _index(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(("/api/", "/static/")):
            return self._error(404, "there is nothing at this address")
        return web.Response(body=self._files["index.html"], content_type="text/html", charset="utf-8")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._files or request.match_info["release"] != self._release:
            return self._error(404, "there is nothing at this address")
        # The content of this address never changes.
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}
        return web.Response(body=self._files[name], headers=headers, content_type=TYPES[Path(name).suffix], charset="utf-8")

    def _error(self, status: int, text: str) -> web.StreamResponse:
        return web.Response(status=status, body=self._encoded({"error": text}), content_type="application/json")


def _id(request: web.Request) -> int:
    text = request.match_info["id"]
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise NotThere(f"{text[:100]!r} is not a number")
    return int(text)


async def serve_until(stop: asyncio.Event, server: ViewServer, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until ``stop``; ``ready`` is told the address. Raises: EndpointError when the port is taken."""
    application = server.application()
    application.freeze()
    try:
        runner = await listen(application._handle, host, port, MAX_CONNECTIONS, application=application)
    except EndpointError as error:
        raise EndpointError(f"{error} with --port, or 0 for any") from error
    try:
        server.port = int(runner.addresses[0][1])
        await server.warm()
        ready(f"http://{f'[{host}]' if ':' in host else host}:{server.port}/")
        async with asyncio.TaskGroup() as tasks:
            ahead = tasks.create_task(server.read_ahead())
            await stop.wait()
            ahead.cancel()
    finally:
        await runner.cleanup()


def _whole(plain: Any) -> Any:
    """Return ``plain`` with halves of characters, which no encoding has, written as Python writes them."""
    if isinstance(plain, str):
        return plain.encode("utf-8", "backslashreplace").decode()
    if isinstance(plain, dict):
        return {_whole(name): _whole(value) for name, value in plain.items()}
    return [_whole(each) for each in plain] if isinstance(plain, list | tuple) else plain
