"""HTTP servers as our processes run them, on aiohttp."""

from services.runtime.http.listener import listen

__all__ = ["listen"]
