"""The process of a reward model: takes conversations from clients, and scores those that wait as batches.

It has the name of its socket before it loads the model, so that of several processes one goes on. It says one thing to its
parent: {"taken": true}, {"error": text} or {"ready": true}.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gspo_services.tasks.reward_model.conversations import Encoded, NoMemoryError, UnreadableConversationError
from gspo_services.tasks.reward_model.options import RewardModelOptions
from gspo_services.tasks.reward_model.wire import address_of, packed, read_message, require_own

if TYPE_CHECKING:
    from gspo_services.tasks.reward_model.classifier import Classifier
from collections.abc import Iterator, Sequence
from typing import TypeVar

Each = TypeVar("Each")


def batches_of(waiting: Sequence[Each], length: Callable[[Each], int], most_tokens: int) -> Iterator[list[Each]]:
    """Batches of at most ``most_tokens``, padding included; one that is longer is alone."""
    batch: list[Each] = []
    for each in sorted(waiting, key=length):
        # Sorted, so this one sets the width of its batch.
        if batch and length(each) * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


Say = Callable[[dict[str, Any]], object]
_BACKLOG: Final = 4096
TAKEN: Final = 0
FAILED: Final = 1


@dataclass(eq=False)
class WaitingConversation:
    """One conversation, until it has its score."""

    encoded: Encoded
    answer: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


async def serve(options: RewardModelOptions, say: Say) -> int:
    """Serve until the process is killed. Returns its exit status when it cannot."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(address_of(options))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            say({"taken": True})
            return TAKEN
        return await _serve_on(listener, options, say)


async def _serve_on(listener: socket.socket, options: RewardModelOptions, say: Say) -> int:
    # Clients may connect from now on; their requests wait until the model is loaded.
    listener.listen(_BACKLOG)
    try:
        classifier = await asyncio.to_thread(_loaded, options)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - libraries raise anything for files that they cannot use
        say({"error": str(error) or type(error).__name__})
        return FAILED
    server = Server(classifier, options)
    async with await asyncio.start_unix_server(server.talk, sock=listener, backlog=_BACKLOG):
        say({"ready": True, "pid": os.getpid()})
        return await server.score_batches()


def _loaded(options: RewardModelOptions) -> Classifier:
    # Not before the process has the name: torch takes seconds.
    from gspo_services.tasks.reward_model.classifier import load_classifier

    return load_classifier(options)


class Server:
    """Conversations that wait, and the loop that scores them."""

    def __init__(self, classifier: Classifier, options: RewardModelOptions) -> None:
        self._classifier = classifier
        self._options = options
        self._waiting: list[WaitingConversation] = []
        self._wanted = asyncio.Event()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a client's requests, one after the other, until it hangs up."""
        try:
            require_own(writer.get_extra_info("socket"))
            while True:
                request = await read_message(reader)
                writer.write(packed(await self._answer(request)))
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """An empty request asks whether the model is there."""
        if not request:
            return {}
        try:
            encoded = self._classifier.encode(request["messages"])
        except UnreadableConversationError as error:
            return {"failure": error.reason, "detail": str(error)}
        waiting = WaitingConversation(encoded)
        self._waiting.append(waiting)
        self._wanted.set()
        return await waiting.answer

    async def score_batches(self) -> int:
        """Score all that wait, again and again. Returns when the model hangs: then a new process is needed."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            for batch in batches_of(waiting, lambda each: len(each.encoded.ids), self._options.batch_tokens):
                try:
                    async with asyncio.timeout(self._options.deadline_s):
                        await self._score(batch)
                except TimeoutError:
                    return FAILED

    async def _score(self, batch: list[WaitingConversation]) -> None:
        """Score a batch; one that cannot be scored as a whole, each conversation alone."""
        try:
            scores = await asyncio.to_thread(self._classifier.scores, [each.encoded for each in batch])
        except Exception as error:  # noqa: BLE001 - a library's error is about this batch
            if len(batch) > 1:
                for each in batch:
                    await self._score([each])
                return
            reason = "memory" if isinstance(error, NoMemoryError) else "raised"
            batch[0].answer.set_result({"failure": reason, "detail": f"{type(error).__name__}: {error}"[:2000]})
            return
        for each, score in zip(batch, scores, strict=True):
            each.answer.set_result(_said(score, is_cut=each.encoded.is_cut))


def _said(score: float, *, is_cut: bool) -> dict[str, Any]:
    if score - score != 0:
        return {"failure": "not_finite", "detail": f"the reward model's score is {score}"}
    return {"score": score, "is_cut": is_cut}
