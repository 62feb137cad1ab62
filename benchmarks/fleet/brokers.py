"""The brokers of one run as processes: one, or several that share it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.broker_intake.child import cpu_s
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.shared.settings.sections import MAX_PORT, PORT_STEP
from tests.support.broker.process import BrokerProcess
from tests.support.processes.ports import free_port

TRIES = 20


class FleetBrokers:
    """Real broker processes on one run directory. CPU, memory, threads and files are those of all of them."""

    def __init__(self, directory: Path, number: int, settings: dict[str, dict[str, Any]], module: str) -> None:
        self.run_directory = directory / "run"
        work, batch = _ports(number)
        shared = {
            "work_endpoint": f"tcp://127.0.0.1:{work}",
            "batch_endpoint": f"tcp://127.0.0.1:{batch}",
            "num_brokers": number,
        }
        self._processes = []
        for place in range(number):
            own = directory / f"config-{place}"
            own.mkdir()
            sections = {
                **settings,
                "run": {**settings["run"], "directory": str(self.run_directory)},
                "broker": {**settings["broker"], **shared, "number": place},
            }
            self._processes.append(BrokerProcess(own, sections, module=module))
        self.work_endpoints = [f"tcp://127.0.0.1:{work + PORT_STEP * place}" for place in range(number)]
        self.batch_endpoints = [f"tcp://127.0.0.1:{batch + PORT_STEP * place}" for place in range(number)]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FleetBrokers"]:
        """Start all; whatever happens, none is left."""
        try:
            for process in self._processes:
                await process.start()
            yield self
        finally:
            for process in self._processes:
                if process.alive:
                    await process.kill()

    @property
    def ledgers(self) -> list[Path]:
        """Of each broker, in order."""
        places = [self.run_directory, *(self.run_directory / f"broker-{k}" for k in range(1, len(self._processes)))]
        return [place / LEDGER_FILE for place in places]

    def cpu_s(self) -> float:
        """CPU seconds so far, without those of killed ones."""
        return sum(cpu_s(process.pid) for process in self._processes)

    def takes(self) -> dict[str, float]:
        """Memory in MiB, threads and open files: sums."""
        each = [psutil.Process(process.pid) for process in self._processes]
        return {
            "rss_mib": sum(one.memory_info().rss for one in each) / 2**20,
            "threads": sum(one.num_threads() for one in each),
            "files": sum(one.num_fds() for one in each),
        }

    async def kill_first(self) -> None:
        """kill -9 of broker 0, which starts again at once."""
        await self._processes[0].kill()
        await self._processes[0].start()

    def first_cpu_s(self) -> float:
        """CPU seconds of broker 0."""
        return cpu_s(self._processes[0].pid)

    async def terminate(self) -> None:
        """End all in order."""
        for process in self._processes:
            await process.terminate()


def _ports(number: int) -> tuple[int, int]:
    """First ports of the two channels, such that those of ``number`` brokers do not meet."""
    for _ in range(TRIES):
        work, batch = free_port(), free_port()
        if number == 1 or ((work - batch) % PORT_STEP and max(work, batch) + PORT_STEP * number <= MAX_PORT):
            return work, batch
    raise RuntimeError(f"no two ports with room for {number} brokers were free in {TRIES} tries")
