"""What counts as a loop that does not turn."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from gspo_services.tasks.worker.monitor import LoopMonitor, waited_s

BLOCKED_S = 0.6


class Said:
    """Keeps what would go to the parent."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    def send(self, message: dict[str, Any]) -> None:
        self.late_s.append(message["late_s"])


@pytest.mark.parametrize("without_processor", [False, True])
def test_time_without_a_processor_is_not_counted(tmp_path: Path, without_processor: bool) -> None:
    schedule, said, loop = tmp_path / "schedstat", Said(), asyncio.new_event_loop()
    schedule.write_text("5 0 1\n")
    monitor = LoopMonitor(loop, said, {}, 0.05)  # type: ignore[arg-type]
    monitor._schedule = str(schedule)

    async def blocked() -> None:
        monitor.start()
        await asyncio.sleep(0)
        if without_processor:
            schedule.write_text(f"6 {round(10 * BLOCKED_S * 1e9)} 2\n")
        time.sleep(BLOCKED_S)  # noqa: ASYNC251

    loop.run_until_complete(blocked())
    loop.close()
    assert (max(said.late_s) > BLOCKED_S / 3) == (not without_processor)


def test_the_time_is_that_of_the_system_where_it_says_so(tmp_path: Path) -> None:
    assert waited_s("/proc/self/schedstat") >= 0
    assert waited_s(str(tmp_path / "none")) == 0.0
    (tmp_path / "odd").write_text("1 x")
    assert waited_s(str(tmp_path / "odd")) == 0.0
