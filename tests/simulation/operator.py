"""An operator in virtual time: ``gspo release RUN_DIR all``."""

import asyncio
from typing import Any

from protocol.channels import BATCH
from protocol.messages import ReleaseRequest
from services.runtime.net.peer import PeerClient
from services.runtime.settings.fingerprint import run_fingerprint
from tests.simulation.loop import Process
from tests.simulation.network import SimContext
from tests.simulation.processes import Machinery

OPERATOR = "operator"
ASKS = 3


class OperatorProcess:
    """Asks the broker several times, as a request may be lost."""

    def __init__(self, machinery: Machinery, process: Process) -> None:
        self._machinery = machinery
        self._process = process

    async def run(self, stop: asyncio.Event) -> None:
        settings = self._machinery.settings
        context: Any = SimContext(self._machinery.network, self._process)
        client = PeerClient(
            context,
            BATCH,
            settings.broker.batch_endpoint,
            role="operator",
            peer=self._process.name,
            session=self._process.session,
            clock=self._machinery.clock,
            fingerprint=run_fingerprint(settings),
        )
        try:
            async with client.running(OPERATOR):
                for _ in range(ASKS):
                    if stop.is_set():
                        break
                    await client.send(ReleaseRequest(batches=[]))
                    await asyncio.sleep(1.0)
        finally:
            context.destroy()

    def check_bounds(self) -> None:
        """It keeps nothing."""
