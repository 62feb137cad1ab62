"""A broker that measures itself: ``python -m benchmarks.broker_intake.staged_broker CONFIG``. At its end it writes the CPU
seconds of each stage beside the configuration, in STAGES_FILE.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from threading import local
from typing import Any, Final
from unittest.mock import patch

from gspo_services.broker.__main__ import main

STAGES_FILE: Final = "stages.json"
STAGES: Final = {
    "receive: frames": ("gspo_services.shared.net.frames", "_Partial.take", "_Partial.parts"),
    "receive: decode, check": ("gspo_services.shared.net.channel", "decode"),
    "queue": ("gspo_services.shared.net.fair_queue", "FairQueue.offer", "FairQueue.take"),
    "decide: ledger": ("gspo_services.broker.sessions", "Sessions.actions"),
    "rows: chunks": ("gspo_services.broker.service", "BrokerService._sort"),
    "rows: trajectories": ("gspo_services.broker.store.schema", "Table.values"),
    "write: statements": ("gspo_services.broker.store.store", "Store._write"),
    "write: commit, mark": ("gspo_services.broker.store.store", "Store.commit"),
    "answer: encode": ("gspo_services.shared.net.channel", "encode"),
}
"""Module and functions of each stage."""


class Stages:
    """CPU seconds of each stage's own code: what a stage calls of another counts there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._thread = local()

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose CPU time counts for ``label``."""

        def call(*arguments: Any, **named: Any) -> Any:
            outer, self._thread.inner = getattr(self._thread, "inner", 0.0), 0.0
            begin = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                spent = time.thread_time() - begin
                self.seconds[label] += spent - self._thread.inner
                self._thread.inner = outer + spent

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time all of STAGES inside."""
        with ExitStack() as stack:
            for label, (module, *names) in STAGES.items():
                for name in names:
                    owner: Any = import_module(module)
                    *path, attribute = name.split(".")
                    for part in path:
                        owner = getattr(owner, part)
                    stack.enter_context(patch.object(owner, attribute, self.timed(label, getattr(owner, attribute))))
            yield


if __name__ == "__main__":
    stages = Stages()
    with stages.watching():
        status = main()
    Path(sys.argv[1]).with_name(STAGES_FILE).write_text(json.dumps(stages.seconds))
    sys.exit(status)
