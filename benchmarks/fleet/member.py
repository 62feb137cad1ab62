"""A process of many rollouts: one JSON request a line on stdin, one JSON answer a line on stdout.

    python -m benchmarks.fleet.member ENDPOINT PACE CHUNK_TOKENS

{"join": [NAMES]} is answered when all of them are welcome; {"lose": N} kills N without a Goodbye, {"leave": N} ends N in
order. {"reset": true} begins a measurement, and {"figures": true} answers what was seen since then. {"watch": true} is asked
before the broker is killed, and {"recover": SECONDS} answers when each rollout worked again. {"acknowledged": FOLDER} writes
what the broker said it has.
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil
import zmq.asyncio

from benchmarks.fleet.load import Load
from benchmarks.fleet.rollout import FakeRollout, FleetFigures
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.logs import configure_logging

LOOK_S: Final = 0.05


class FleetProcess:
    """The rollouts of this process."""

    def __init__(self, endpoint: str, load: Load) -> None:
        self._endpoint = endpoint
        self._load = load
        self._clock = MonotonicClock()
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_000)
        self._figures = FleetFigures()
        self._rollouts: dict[FakeRollout, asyncio.Task[None]] = {}
        self._gone: dict[int, tuple[int, int]] = {}
        """What was acknowledged to rollouts that are lost or have left."""
        self._loop_late_s = 0.0

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        match request:
            case {"join": names}:
                return await self._join(names)
            case {"lose": number}:
                return await self._end(number, orderly=False)
            case {"leave": number}:
                return await self._end(number, orderly=True)
            case {"reset": _}:
                self._begin()
                return {}
            case {"figures": _}:
                return self._seen()
            case {"watch": _}:
                for rollout in self._rollouts:
                    rollout.watch_from(self._clock.now())
                return {}
            case {"recover": seconds}:
                return await self._recovered(seconds)
            case {"acknowledged": folder}:
                return self._write_acknowledged(Path(folder) / f"acknowledged-{os.getpid()}.json")
        raise ValueError(f"unknown request: {request}")

    async def watch_loop(self) -> None:
        """Notice how late this process's own loop is: then its latencies are its own and not the broker's."""
        while True:
            before = self._clock.now()
            await asyncio.sleep(LOOK_S)
            self._loop_late_s = max(self._loop_late_s, self._clock.now() - before - LOOK_S)

    async def close(self) -> None:
        """End all, without a Goodbye: the broker may be gone."""
        await self._end(len(self._rollouts), orderly=False)
        self._context.destroy(linger=0)

    async def _join(self, names: list[str]) -> dict[str, Any]:
        joined = []
        for name in names:
            rollout = FakeRollout(self._context, self._endpoint, name, self._clock, self._load, self._figures)
            self._rollouts[rollout] = asyncio.get_running_loop().create_task(rollout.run(), name=name)
            joined.append(rollout)
        for rollout in joined:
            await rollout.peer.connected_welcome()
        return {}

    async def _end(self, number: int, *, orderly: bool) -> dict[str, Any]:
        for rollout, task in list(self._rollouts.items())[:number]:
            if not orderly:
                rollout.be_killed()
            del self._rollouts[rollout]
            task.cancel()
            await asyncio.wait([task])
            self._note_acknowledged(rollout, self._gone)
        return {}

    def _begin(self) -> None:
        for each in (self._figures.ack_s, self._figures.lease_s):
            each.clear()
        self._figures.chunks = self._figures.leases = self._figures.no_leases = self._figures.ended = 0
        self._loop_late_s = 0.0

    def _seen(self) -> dict[str, Any]:
        """Figures, and what the process takes. Raises: Exception of a rollout that ended by itself."""
        for task in self._rollouts.values():
            if task.done():
                task.result()
        process = psutil.Process()
        takes = {"rss_bytes": process.memory_info().rss, "files": process.num_fds()}
        return {**asdict(self._figures), "loop_late_s": self._loop_late_s, **takes}

    async def _recovered(self, seconds: float) -> dict[str, Any]:
        """When each rollout worked again, by the machine's clock; fewer than all after ``seconds``."""
        end = self._clock.now() + seconds
        while any(not rollout.working_since for rollout in self._rollouts) and self._clock.now() < end:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return {"working_since": [each.working_since for each in self._rollouts if each.working_since]}

    def _write_acknowledged(self, path: Path) -> dict[str, Any]:
        tokens = dict(self._gone)
        for rollout in self._rollouts:
            rollout.settle()
            self._note_acknowledged(rollout, tokens)
        path.write_text(json.dumps(tokens))
        return {"path": str(path)}

    @staticmethod
    def _note_acknowledged(rollout: FakeRollout, into: dict[int, tuple[int, int]]) -> None:
        for trajectory_id, newest in rollout.acknowledged.items():
            into[trajectory_id] = max(newest, into.get(trajectory_id, newest))


async def serve(endpoint: str, load: Load) -> None:
    """Answer until stdin is closed."""
    process = FleetProcess(endpoint, load)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(process.watch_loop(), name="loop")
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await process.answer(json.loads(line))), flush=True)
        watching.cancel()
    await process.close()


def main() -> None:
    """See the module's text."""
    endpoint, pace, chunk_tokens = sys.argv[1:]
    configure_logging("fleet", "error")
    asyncio.run(serve(endpoint, Load(pace=float(pace), chunk_tokens=int(chunk_tokens))))


if __name__ == "__main__":
    main()
