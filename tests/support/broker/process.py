"""A real broker process for tests: started, killed, started again on the same directory and ports."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.processes.ports import free_port

START_TIMEOUT_S = 60.0


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until ``condition`` holds. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is watched is another process, which sets no Event
            await asyncio.sleep(0.02)


class BrokerDidNotStart(RuntimeError):
    """The process ended; the text is its own."""


@dataclass
class BrokerProcess:
    """``python -m gspo_services.broker`` with a directory and ports of its own; ``events`` are its log lines."""

    directory: Path
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    module: str = "gspo_services.broker"
    """What runs it; another one may measure it."""
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics_port: int = 0

    def __post_init__(self) -> None:
        self.run_directory = self.directory / "run"
        self.work_endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.batch_endpoint = f"tcp://127.0.0.1:{free_port()}"
        sections: dict[str, dict[str, Any]] = {
            "run": {"directory": str(self.run_directory), "num_batches": 4},
            "batch": {"group_size": 2, "groups_per_batch": 2, "mini_batches": 1, "max_lag": 1},
            "evaluation": {"every_batches": 0},
            "broker": {"work_endpoint": self.work_endpoint, "batch_endpoint": self.batch_endpoint, "metrics_port": 0},
        }
        for section, values in self.settings.items():
            sections.setdefault(section, {}).update(values)
        self.work_endpoint = sections["broker"]["work_endpoint"]
        self.batch_endpoint = sections["broker"]["batch_endpoint"]
        text = "".join(
            f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            for section, values in sections.items()
        )
        self.config = self.directory / "config.toml"
        self.config.write_text(text)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        assert self._process is not None
        return self._process.returncode

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start and wait until it serves."""
        before = self.count("broker_started")
        await self.launch()
        await self.serves(before)

    async def launch(self) -> None:
        """Start, and do not wait."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.module,
            str(self.config),
            stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reader = asyncio.get_running_loop().create_task(self._read(self._process))

    async def serves(self, before: int = 0) -> None:
        """Wait until it serves, for more than the ``before``-th time. Raises: BrokerDidNotStart."""
        process = self._process
        assert process is not None
        assert self._reader is not None
        await eventually(lambda: self.count("broker_started") > before or process.returncode is not None, START_TIMEOUT_S)
        if self.count("broker_started") == before:
            await self._reader
            raise BrokerDidNotStart(self.last("cannot_start", "stopped_by_error", "damaged", "no_room")["error"])
        self.metrics_port = self.last("broker_started")["metrics_port"]

    async def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        await self._ended()

    async def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return await self._ended()

    async def _ended(self) -> int:
        assert self._process is not None
        assert self._reader is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            status = await self._process.wait()
            await self._reader
        return status

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            with contextlib.suppress(json.JSONDecodeError):
                self.events.append(json.loads(line))
                continue
            self.events.append({"event": "not json", "text": line.decode()})

    def count(self, event: str) -> int:
        """How often the log has this event."""
        return sum(1 for line in self.events if line["event"] == event)

    def last(self, *events: str) -> dict[str, Any]:
        """The last log line of one of these events."""
        return next(line for line in reversed(self.events) if line["event"] in events)

    async def logged(self, event: str, times: int = 1, timeout_s: float = 60.0) -> None:
        """Wait until the log has this event ``times`` times."""
        await eventually(lambda: self.count(event) >= times, timeout_s)

    def metrics_lines(self) -> list[dict[str, Any]]:
        """The run's metrics.jsonl."""
        return [json.loads(line) for line in (self.run_directory / "metrics.jsonl").read_text().splitlines()]

    async def http(self, path: str) -> tuple[int, str]:
        """GET from the metrics port: status and body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.metrics_port)
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body


async def scraped(broker: BrokerProcess, *lines: str, timeout_s: float = 10.0) -> None:
    """Wait until /metrics has all ``lines``: gauges follow the ledger with the broker's next tick."""
    missing = set(lines)
    async with asyncio.timeout(timeout_s):
        while missing:
            _, text = await broker.http("/metrics")
            missing -= set(text.splitlines())


@contextlib.asynccontextmanager
async def broker_process(
    directory: Path, *, module: str = "gspo_services.broker", **settings: dict[str, Any]
) -> AsyncIterator[BrokerProcess]:
    """A started broker, gone at the end whatever happens."""
    process = BrokerProcess(directory, settings, module=module)
    await process.start()
    try:
        yield process
    finally:
        if process.alive:
            await process.kill()
