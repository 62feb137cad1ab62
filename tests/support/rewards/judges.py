"""A judge's API that is scripted, and reward functions that ask it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from aiohttp import web

from gspo.tasks.judge import Judge
from tests.support.rewards.services import served


def completion(text: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}


class FakeJudge:
    """Answers with the number of the request, or what ``script`` says: (status, body), at once."""

    def __init__(self) -> None:
        self.script: list[tuple[int, Any]] = []
        self.headers: dict[str, str] = {}
        """Of scripted answers, besides one that lets the client try again at once."""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.ports: list[int] = []
        self.on_request: Callable[[], None] = lambda: None
        """Called when a request has come."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.on_request()
        self.ports.append(request.transport.get_extra_info("peername")[1])
        self.keys.append(request.headers["Authorization"])
        self.requests.append(await request.json())
        if self.script:
            status, body = self.script.pop(0)
            headers = {"retry-after-ms": "1", **self.headers}
            if isinstance(body, str):
                return web.Response(status=status, text=body, headers=headers)
            return web.json_response(body, status=status, headers=headers)
        return web.json_response(completion(str(len(self.requests))))


@asynccontextmanager
async def judged() -> AsyncIterator[tuple[FakeJudge, str]]:
    """A judge, and its base URL."""
    judge = FakeJudge()
    async with served(judge.handle, "/v1/chat/completions") as url:
        yield judge, url.removesuffix("/chat/completions")


@cache
def the_judge(url: str, folder: str | None, options: tuple[tuple[str, Any], ...] = ()) -> Judge:
    return Judge("judge", base_url=url, folder=folder, max_retries=0, **dict(options))


async def asks(text: str, url: str, folder: str | None = None) -> float:
    """The judge's answer as the reward."""
    return float(await the_judge(url, folder).ask([{"role": "user", "content": text}]))
