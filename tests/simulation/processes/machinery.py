"""What all processes of a run share: its settings, virtual time, the network, the broker's disk, the audit."""

from gspo_services.shared.settings.sections import Settings
from tests.simulation.audit.audit import Audit
from tests.simulation.episodes import SimEnvironment
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import Network
from tests.simulation.processes.watched import Disk

MAX_QUIET_S = 120.0


class LoopClock:
    """Virtual time as the services see it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return 1000.0 + self._loop.time()


class Machinery:
    """The parts that all processes of a world share."""

    def __init__(
        self, settings: Settings, environment: SimEnvironment, loop: VirtualLoop, network: Network, audit: Audit
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.loop = loop
        self.network = network
        self.audit = audit
        self.clock = LoopClock(loop)
        self.disk = Disk()
