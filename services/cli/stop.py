"""``gspo stop RUN_DIR``: let a run finish its current batch, save, and end."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo_services.cli.operator import NoAnswer, operator
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import Settings, override_settings, read_run_settings

ANSWER_S: Final = 15.0


def stop_command(directory: Path, reason: str, overrides: Sequence[str]) -> int:
    """Ask the broker to stop the run. Returns 0 when it agrees, 1 when it does not answer.

    Raises: ConfigurationError when there is no such run.
    """
    configure_logging("stop", usual_level="warning")
    settings = override_settings(read_run_settings(directory), [f"run.directory={directory}", *overrides])
    try:
        text = asyncio.run(_stop(settings, reason))
    except NoAnswer as error:
        print(one_line(f"gspo stop: {error}; `gspo doctor {directory}` shows what is running"), file=sys.stderr)
        return 1
    print(one_line(text))
    return 0


async def _stop(settings: Settings, reason: str) -> str:
    async with operator(settings) as broker:
        status = await broker.stop(reason, ANSWER_S)
    if status["finished"]:
        return f"the run has ended: {status['batches_trained']} batches are trained"
    assembled, trained = status["batches_assembled"], status["batches_trained"]
    rest = f"finishes batch {assembled - 1}, saves and exports" if assembled > trained else "saves and exports"
    return f"the run is stopping ({status['stopping']}): the learner {rest}"
