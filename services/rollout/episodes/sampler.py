"""Samples one call's answer into the episode's log, continuing from the tokens already there."""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from hashlib import sha256

import msgspec
import numpy as np

from gspo_protocol.messages import Lease
from gspo_services.rollout.endpoint import CallRefused
from gspo_services.rollout.episodes.budget import Budget
from gspo_services.rollout.episodes.live import LiveCall
from gspo_services.rollout.episodes.log import EpisodeLog, Round
from gspo_services.rollout.episodes.records import CallRecord
from gspo_services.rollout.episodes.shared import EpisodeShared
from gspo_services.rollout.episodes.writer import EpisodeWriter
from gspo_services.rollout.sglang import EngineError, EngineRefused, GenerateRequest, OutputPiece, SamplingParameters


class CallSampler:
    """The sampler of one episode. Concurrent calls share its log, where their tokens alternate in parts of chunk_tokens."""

    def __init__(self, shared: EpisodeShared, log: EpisodeLog, writer: EpisodeWriter, budget: Budget, lease: Lease) -> None:
        """``seed``: of the episode."""
        self._shared = shared
        self._log = log
        self._writer = writer
        self._budget = budget
        self._seed = lease.seed
        self._sampling = lease.sampling

    async def sample(self, live: LiveCall, record: CallRecord, part: Round) -> bool:
        """Sample and send the rest of ``part``. Returns whether the length limit cut the answer.

        waits for:    weight updates, the engine, credit of the broker
        Raises: CallRefused when the engine refuses the prompt; EngineError; EpisodeFailed. After any of these, and after a
        cancellation, all sampled tokens are in the log.
        """
        answer = _GrowingAnswer(self._shared, live, record, part)
        if answer.has_ended:
            return answer.is_cut
        with self._kept(answer, record):
            await self._generate(answer, live, record, part)
        if not answer.has_ended:
            # It is at the end of its own context. A replay must not ask for it again.
            record = msgspec.structs.replace(record, max_tokens=answer.num_tokens)
            async with self._writer.alone() as writer:
                await writer.tokens()
                await writer.entry(record.entry())
            return True
        await self._send()
        return answer.is_cut

    async def _generate(self, answer: "_GrowingAnswer", live: LiveCall, record: CallRecord, part: Round) -> None:
        shared = self._shared
        sampling = SamplingParameters(
            max_new_tokens=record.max_tokens - answer.num_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            stop_token_ids=tuple(sorted(answer.stop_ids)),
            seed=_seed_of(self._seed, record.ordinal),
            adapter=self._sampling.adapter,
        )
        rid = f"{self._log.trajectory_id}-{self._log.epoch}-{record.ordinal}"
        request = GenerateRequest(rid=rid, input_ids=np.concatenate([part.prompt_ids, part.action_ids]), sampling=sampling)
        await shared.may_generate.wait()
        try:
            async with aclosing(shared.engine.generate(request)) as pieces:
                async for piece in pieces:
                    shared.metrics.tokens.labels(kind="action").inc(answer.add(piece))
                    if answer.has_ended:
                        break
                    if piece.finish_reason == "abort" or (piece.finish_reason is not None and not answer.num_tokens):
                        raise EngineError(f"generation {rid} was ended by the engine: {piece.finish_reason}")
                    if answer.num_pending >= shared.chunk_tokens and self._budget.may_send_part():
                        self._keep(answer, record)
                        await self._send()
        except EngineRefused as error:
            text = f"the engine refused the request: {error}: send fewer messages"
            raise CallRefused(400, "engine_refused", text, param="messages") from error

    @contextmanager
    def _kept(self, answer: "_GrowingAnswer", record: CallRecord) -> Iterator[None]:
        """Put sampled tokens into the log, whatever ends the block."""
        try:
            yield
        finally:
            self._keep(answer, record)

    def _keep(self, answer: "_GrowingAnswer", record: CallRecord) -> None:
        for piece in answer.taken():
            self._log.act(record.sequence, piece)
        self._budget.promise(record.ordinal, record.max_tokens - answer.num_tokens, has_begun=answer.num_tokens > 0)

    async def _send(self) -> None:
        async with self._writer.alone() as writer:
            await writer.tokens()


class _GrowingAnswer:
    """The tokens of one answer, in the log and not yet in it."""

    def __init__(self, shared: EpisodeShared, live: LiveCall, record: CallRecord, part: Round) -> None:
        self.stop_ids = shared.renderer.stop_ids | frozenset(live.request.stop_token_ids)
        self._live = live
        self._record = record
        prompt = part.prompt_ids.tolist()
        before = len(prompt) - record.opening
        self._stream = shared.renderer.stream(live.request.stop, prompt[:before])
        self._pending: list[OutputPiece] = []
        sampled = part.action_ids.tolist()
        self.num_tokens = len(sampled)
        self._last = sampled[-1] if sampled else None
        live.say(record, self._stream.feed([*prompt[before:], *sampled]))

    @property
    def num_pending(self) -> int:
        return sum(len(piece.token_ids) for piece in self._pending)

    @property
    def is_cut(self) -> bool:
        return self._last not in self.stop_ids and self._stream.stopped_at is None

    @property
    def has_ended(self) -> bool:
        return not self.is_cut or self.num_tokens >= self._record.max_tokens

    def add(self, piece: OutputPiece) -> int:
        """Add the tokens up to the end of the answer. Returns their number."""
        ids = piece.token_ids.tolist()
        self._live.say(self._record, self._stream.feed(ids))
        stopped_at = self._stream.stopped_at
        stopped_at = None if stopped_at is None else stopped_at - self._record.opening
        # What the engine has made after a stop string is not part of the turn.
        num_taken = len(ids) if stopped_at is None else stopped_at - self.num_tokens
        self._pending.append(piece.first(num_taken))
        self.num_tokens += num_taken
        self._last = ids[num_taken - 1] if num_taken else self._last
        return num_taken

    def taken(self) -> list[OutputPiece]:
        """Return the tokens that are not in the log yet; the caller puts them there."""
        pending, self._pending = self._pending, []
        return pending


def _seed_of(seed: int, ordinal: int) -> int:
    """Return the call's seed, so that a deterministic engine gives equal prompts different tokens."""
    return int.from_bytes(sha256(f"{seed}/{ordinal}".encode()).digest()[:8]) >> 1
