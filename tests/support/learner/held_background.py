"""A learner's background work, done when a test wants it."""

from __future__ import annotations

from collections.abc import Callable


class HeldJob:
    """Does its work when the background allows it, and keeps the result."""

    def __init__(self, work: Callable[[], str], background: HeldBackground) -> None:
        self._work = work
        self._background = background
        self._ended = False
        self._result = ""
        self._error: Exception | None = None

    def ended(self, timeout_s: float) -> bool:
        if not self._ended and (timeout_s > 0 or not self._background.until_waited_for):
            self._do()
        return self._ended

    def _do(self) -> None:
        self._ended = True
        try:
            if self._background.failure is not None:
                raise self._background.failure
            self._result = self._work()
        except Exception as error:  # noqa: BLE001 - raised by ``result``
            self._error = error

    def result(self) -> str:
        if self._error is not None:
            raise self._error
        return self._result


class HeldBackground:
    """Work is done when a caller asks whether it has ended, or (``until_waited_for``) only when a caller waits for it."""

    def __init__(self, *, until_waited_for: bool, failure: Exception | None = None) -> None:
        """``failure`` is raised instead of doing the work."""
        self.until_waited_for = until_waited_for
        self.failure = failure

    def start(self, work: Callable[[], str]) -> HeldJob:
        return HeldJob(work, self)
