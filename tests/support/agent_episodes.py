"""Agents' episodes for tests: a broker that takes only what the real intake takes, and gives leases from any point on."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import groupby
from typing import Any

import numpy as np
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter

from gspo_protocol.codec import Array, decode, encode
from gspo_protocol.limits import TrajectoryLimits, trajectory_limits
from gspo_protocol.messages import Chunk, Finish, GroupSampling, Journal, Lease, Message
from gspo_protocol.messages.journal import journal_array, pack_entry
from gspo_protocol.messages.pieces import Pieces, piece_arrays
from gspo_services.broker.ledger.intake import TokenFacts, check_finish, grown_row, growth, journal_entry
from gspo_services.broker.rows import TrajectoryRow, VersionRow
from gspo_services.rollout.endpoint import CallAnswer, CallDelta, CallRequest
from gspo_services.rollout.episodes import EpisodeCalls, EpisodeShared
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.rendering import Renderer
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.episodes import a_new_lease

NEWEST = VersionRow(policy_version=99, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=600)
NOW = 1_700_000_000


class LedgerBroker:
    """Takes an episode's messages in order, as the broker's intake does. ``keeps`` bounds how many of them are durable."""

    def __init__(
        self,
        sampling: GroupSampling,
        limits: TrajectoryLimits | None = None,
        keeps: int | None = None,
        vocabulary: int = 600,
    ) -> None:
        self._newest = replace(NEWEST, vocabulary=vocabulary)
        self._sampling = sampling
        self._limits = limits or trajectory_limits(1)
        self._keeps = keeps
        self.row = TrajectoryRow(trajectory_id=7, group_id=3, status="leased", epoch=1, lease_version=1)
        self.messages: list[Message] = []
        self.chunks: list[tuple[Chunk, Mapping[str, Array]]] = []
        self.entries: list[dict[str, Any]] = []
        self.finish: Finish | None = None
        self.full = asyncio.Event()
        """Everything that it keeps is there: what is sent from now on is lost."""

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        await asyncio.sleep(0)
        if self._keeps is not None and len(self.messages) >= self._keeps:
            self.full.set()
            return
        received = decode([bytes(frame) for frame in encode(message, arrays)])
        self.take(received.message, received.arrays)

    async def acknowledged(self) -> None:
        await asyncio.sleep(0)
        if self.full.is_set():
            await asyncio.Event().wait()

    def take(self, message: Message, arrays: Mapping[str, Array]) -> None:
        self.messages.append(message)
        match message:
            case Chunk():
                self._take_chunk(message, arrays)
            case Journal():
                row = journal_entry(self.row, message)
                self.entries.append(message.entry)
                self.row = replace(
                    self.row,
                    num_entries=self.row.num_entries + 1,
                    journal_bytes=self.row.journal_bytes + len(row.entry),
                )
            case Finish():
                check_finish(self.row, message)
                assert self.finish is None
                self.finish = message
            case _:
                raise AssertionError(f"{message} is not sent by episodes")

    def _take_chunk(self, chunk: Chunk, arrays: Mapping[str, Array]) -> None:
        assert chunk.offset == self.row.num_tokens
        found = growth(
            self.row,
            chunk,
            TokenFacts(largest_token_id=int(arrays["token_ids"].max())),
            newest=self._newest,
            limits=self._limits,
            sampling=self._sampling,
        )
        self.chunks.append((chunk, arrays))
        self.row = grown_row(self.row, chunk, found)

    def lease(self) -> tuple[Lease, dict[str, Array]]:
        """The next lease, with everything that was taken."""
        self.row = replace(self.row, epoch=self.row.epoch + 1, lease_version=1)
        names = {"token_ids": np.int32, "logprobs": np.float32}
        arrays: dict[str, Array] = {
            name: np.concatenate([arrays[name] for _, arrays in self.chunks] or [np.empty(0, dtype)])
            for name, dtype in names.items()
        }
        arrays |= piece_arrays([Pieces(c.segments, c.version_runs, c.turn_rewards) for c, _ in self.chunks])
        arrays |= journal_array([pack_entry(entry) for entry in self.entries])
        state: dict[str, Any] | None = {} if self.chunks else None
        lease = a_new_lease(
            epoch=self.row.epoch,
            num_tokens=self.row.num_tokens,
            num_entries=len(self.entries),
            state=state,
            sampling=self._sampling,
        )
        received = decode([bytes(frame) for frame in encode(lease, arrays)])
        return received.message, received.arrays  # type: ignore[return-value]

    def resumed(self) -> "LedgerBroker":
        """The same broker, for the next lease: nothing is lost from here on."""
        other = LedgerBroker(self._sampling, self._limits)
        other.row, other.chunks, other.entries = self.row, list(self.chunks), list(self.entries)
        other.messages = list(self.messages)
        return other

    def sequences(self) -> dict[int, list[tuple[str, int]]]:
        """Kind and id of each sequence's tokens."""
        found: dict[int, list[tuple[str, int]]] = {}
        for chunk, arrays in self.chunks:
            ids = iter(arrays["token_ids"].tolist())
            for segment in chunk.segments:
                tokens = [(segment.kind, next(ids)) for _ in range(segment.num_tokens)]
                found.setdefault(segment.sequence, []).extend(tokens)
        return found


def sampling_of(**changes: Any) -> GroupSampling:
    fields: dict[str, Any] = {
        "temperature": 0.7, "max_turn_tokens": 12, "max_tokens": 512, "max_episode_tokens": 4096,
    }  # fmt: skip
    return GroupSampling(**{**fields, **changes})


def shared_of(renderer: Renderer, broker: LedgerBroker, engine: ScriptedEngine, **changes: Any) -> Any:
    may_generate = asyncio.Event()
    may_generate.set()
    fields: dict[str, Any] = {
        "renderer": renderer, "engine": engine, "broker": broker, "may_generate": may_generate,
        "limits": trajectory_limits(1), "chunk_tokens": 4, "metrics": RolloutMetrics(CollectorRegistry()),
        "wall_s": lambda: NOW,
    }  # fmt: skip
    return EpisodeShared(**{**fields, **changes})


@asynccontextmanager
async def an_episode(shared: EpisodeShared, lease: tuple[Lease, dict[str, Array]]) -> AsyncIterator[EpisodeCalls]:
    """A running episode; calls under way are cut off at the end, as a kill does."""
    async with asyncio.TaskGroup() as tasks:
        calls = EpisodeCalls(*lease, shared, tasks)
        try:
            yield calls
        finally:
            await calls.close()


async def ask(calls: EpisodeCalls, messages: Sequence[Mapping[str, Any]], **fields: Any) -> CallAnswer:
    """The answer of one call, whose deltas are a beginning of it. Raises: CallRefused."""
    said, answer = CallDelta(id="", created=0), None
    async with aclosing(calls.call(CallRequest(messages=[dict(message) for message in messages], **fields))) as pieces:
        async for piece in pieces:
            if isinstance(piece, CallAnswer):
                assert (piece.content or "").startswith(said.content)
                assert (piece.reasoning or "").startswith(said.reasoning)
                answer = piece
                continue
            said = replace(piece, content=said.content + piece.content, reasoning=said.reasoning + piece.reasoning)
    assert answer is not None, "the call ended without an answer"
    return answer


def echoed(answer: CallAnswer) -> dict[str, Any]:
    """The answer as a client repeats it."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    return {**message, "tool_calls": calls} if calls else message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def contexts_of(broker: LedgerBroker) -> dict[tuple[int, ...], int]:
    """Of every sampled token: all tokens before it in its sequence, and itself."""
    found: dict[tuple[int, ...], int] = {}
    for tokens in broker.sequences().values():
        ids = [token for _, token in tokens]
        for place, (kind, token) in enumerate(tokens):
            if kind == "action":
                found[tuple(ids[:place])] = token
    return found


def counted(counter: Counter) -> float:
    """The value of a counter without labels."""
    (sample,) = [sample for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")]
    return sample.value


def kinds_in(tokens: Sequence[tuple[str, int]]) -> list[str]:
    return [kind for kind, _ in groupby(tokens, key=lambda token: token[0])]
