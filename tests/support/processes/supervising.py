"""A supervisor of two children, as a process: ``python -m tests.support.processes.supervising PIPE LOGS``."""

import asyncio
import sys
from pathlib import Path

from gspo_services.cli.run.supervisor import ProcessSpec, Supervisor
from gspo_services.shared.runtime.clock import MonotonicClock


def main(pipe: str, logs: str) -> None:
    specs = [
        ProcessSpec(
            name=name, module="tests.support.processes.child", arguments=(name, pipe, "serve"), stop_order=0, grace_s=10.0
        )
        for name in ("one", "two")
    ]
    asyncio.run(Supervisor(specs, Path(logs), MonotonicClock()).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
