"""The page's server in this process, and what it answers."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp.test_utils import TestClient

Client = TestClient[Any, Any]
Serve = Callable[..., Awaitable[Client]]
"""Serves run directories."""


async def answer(client: Client, path: str) -> Any:
    response = await client.get(path)
    assert response.status == 200, await response.text()
    return await response.json()


async def refused(client: Client, path: str, status: int, **options: Any) -> str:
    response = await client.get(path, **options)
    assert response.status == status
    return str((await response.json())["error"])
