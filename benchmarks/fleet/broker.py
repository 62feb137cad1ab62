"""The broker of a fleet, as a process."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.broker_intake.child import cpu_s
from gspo_services.broker.store.reader import LEDGER_FILE
from tests.support.broker.process import BrokerProcess
from tests.support.processes.ports import free_ports


class MeasuredProcess:
    """A real broker process."""

    def __init__(self, directory: Path, settings: dict[str, dict[str, Any]], module: str) -> None:
        self.run_directory = directory / "run"
        self.work_endpoint, self.batch_endpoint = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        sections = {
            **settings,
            "run": {**settings["run"], "directory": str(self.run_directory)},
            "broker": {**settings["broker"], "work_endpoint": self.work_endpoint, "batch_endpoint": self.batch_endpoint},
        }
        own = directory / "config"
        own.mkdir()
        self._process = BrokerProcess(own, sections, module=module)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["MeasuredProcess"]:
        """Start it; whatever happens, it is not left."""
        try:
            await self._process.start()
            yield self
        finally:
            if self._process.alive:
                await self._process.kill()

    @property
    def ledger(self) -> Path:
        """Its file."""
        return self.run_directory / LEDGER_FILE

    def cpu_s(self) -> float:
        """CPU seconds so far, of this life alone."""
        return cpu_s(self._process.pid)

    def takes(self) -> dict[str, float]:
        """Memory in MiB, threads and open files."""
        process = psutil.Process(self._process.pid)
        return {
            "rss_mib": process.memory_info().rss / 2**20,
            "threads": process.num_threads(),
            "files": process.num_fds(),
        }

    async def kill(self) -> None:
        """kill -9; it starts again at once."""
        await self._process.kill()
        await self._process.start()

    async def terminate(self) -> None:
        """End it in order."""
        await self._process.terminate()
