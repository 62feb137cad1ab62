"""A rollout without an engine: it answers every lease with one long episode, in chunks.

``python -m benchmarks.batch_parts.rollout WORK_ENDPOINT CHUNK_TOKENS EPISODE_TOKENS``
"""

import asyncio
import sys

import zmq.asyncio

from gspo_protocol.messages import Chunk, Finish, Lease, Segment, VersionRun
from gspo_services.shared.runtime.logs import configure_logging
from tests.support.broker.peers import PROMPT_TOKENS, ScriptedRollout, logprobs_of, tokens_of


class LongEpisodes(ScriptedRollout):
    """Each episode has ``action_tokens`` after its prompt, in chunks of ``chunk_tokens``."""

    chunk_tokens: int

    async def _episode(self, lease: Lease) -> None:
        length = PROMPT_TOKENS + self.action_tokens
        token_ids, logprobs = tokens_of(lease.trajectory_id, length), logprobs_of(lease.trajectory_id, length)
        offset = lease.num_tokens
        while offset < length:
            end = min(length, PROMPT_TOKENS if offset < PROMPT_TOKENS else offset + self.chunk_tokens)
            kind, version = ("observation", -1) if offset < PROMPT_TOKENS else ("action", self.policy_version)
            chunk = Chunk(
                trajectory_id=lease.trajectory_id, epoch=lease.epoch, offset=offset, num_tokens=end - offset,
                segments=[Segment(kind, 0, end - offset)],  # type: ignore[arg-type]
                version_runs=[VersionRun(version, end - offset)], state={}, turn_done=end == length,
            )  # fmt: skip
            await self.peer.send(chunk, {"token_ids": token_ids[offset:end], "logprobs": logprobs[offset:end]})
            offset = end
        reward = float(lease.seed % 2)
        finish = Finish(
            trajectory_id=lease.trajectory_id, epoch=lease.epoch, num_tokens=length, reason="length", turn_rewards=[reward]
        )
        await self.peer.send(finish)
        if self._held.pop(lease.trajectory_id, None) is not None:
            self.finished += 1


async def main() -> None:
    configure_logging("rollout")
    endpoint, chunk_tokens, episode_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    context = zmq.asyncio.Context()
    rollout = LongEpisodes(context, endpoint, "rollout", "s", capacity=32, action_tokens=episode_tokens - PROMPT_TOKENS)
    rollout.chunk_tokens = chunk_tokens
    await rollout.run()


if __name__ == "__main__":
    asyncio.run(main())
