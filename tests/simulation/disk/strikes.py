"""The weather of the broker's files: full disks, damage, losses, backups put back."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

from gspo_services.broker.store.reader import LEDGER_FILE
from tests.simulation.audit.restoring import AcceptedLoss, Restoring
from tests.simulation.disk.damage import Damage
from tests.simulation.loop import NOBODY, VirtualLoop
from tests.simulation.network import Network
from tests.simulation.plan import Event, Plan
from tests.simulation.processes.host import Host
from tests.simulation.processes.machinery import Machinery
from tests.simulation.weather import ACCEPTED_LOSS, DAMAGES


class DiskStorm(ABC):
    """What a world's weather does to files; the world starts and ends processes."""

    def __init__(
        self, plan: Plan, loop: VirtualLoop, network: Network, machinery: Machinery, happened: Counter[str]
    ) -> None:
        self.plan = plan
        self.loop = loop
        self.network = network
        self.machinery = machinery
        self.happened = happened
        names = ["broker", "learner", *(f"rollout-{index}" for index in range(plan.num_rollouts))]
        self.hosts = {name: Host(name) for name in names}
        self.stood_still_s = 0.0

    @property
    @abstractmethod
    def run_is_over(self) -> bool: ...

    @abstractmethod
    def start(self, host: Host) -> None: ...

    @abstractmethod
    def kill(self, host: Host) -> None: ...

    @abstractmethod
    def note(self, who: str, event: str, **fields: Any) -> None: ...

    def _later(self, seconds: float, what: Callable[[], object], note: str) -> None:
        def end() -> None:
            self.note("weather", note)
            what()

        self.loop.call_later(seconds, end, context=NOBODY)

    def _on_kill(self, event: Event) -> bool:
        host = self.hosts[event.target[0]]
        if host.task is None:
            return False
        host.down_s = event.seconds
        self.kill(host)
        return True

    def _kill_all(self) -> None:
        for host in self.hosts.values():
            host.down_s, host.part = 2.0, None
            self.kill(host)

    def _on_disk_full(self, event: Event) -> bool:
        disk = self.machinery.disk
        disk.full = True

        def end() -> None:
            disk.full = False

        self._later(event.seconds, end, "the disk has room again")
        return True

    def _on_damage(self, event: Event) -> bool:
        """The broker is killed; when it starts again, a file is as it was, or a row is not what was written."""
        host, disk, settings = self.hosts[event.target[0]], self.machinery.disk, self.machinery.settings
        directory = settings.run.directory
        if disk.damage is not None or not (directory / LEDGER_FILE).is_file():
            return False
        damage = Damage(DAMAGES[int(event.amount)], directory)
        if damage.kind == ACCEPTED_LOSS:
            damage.accepted = AcceptedLoss(settings, self.machinery.audit)

        def kill() -> None:
            host.down_s = 2.0
            self._on_kill(event)
            self.loop.call_later(1.0, strike, context=NOBODY)

        def strike() -> None:
            if host.task is None and disk.damage is None:
                damage.strike()
                disk.damage = damage
                self.note("weather", f"the files of {host.name} are damaged: {damage.kind}")
            else:
                damage.forget()

        self._later(event.seconds, kill, f"{host.name} is killed for its files")
        return True

    def _on_restore(self, event: Event) -> bool:
        """Everything is lost some seconds after a backup, and restored from it."""
        disk, audit = self.machinery.disk, self.machinery.audit
        restoring = Restoring(self.machinery.settings, audit)

        def put_back() -> None:
            if not self.run_is_over:
                self._kill_all()  # what was just being started
                disk.newest_commit, disk.damage = 0, None
                self.happened[restoring.restore(earlier=event.amount > 0) or "restore refused"] += 1

        def copy() -> None:
            if event.amount and not audit.durable.next_batch_checkpointed and not self.run_is_over:
                self.loop.call_later(0.5, copy, context=NOBODY)  # until there is an earlier time
            elif not self.run_is_over and restoring.back_up():
                self._later(event.seconds, self._kill_all, "the run is lost")
                self._later(event.seconds + 0.5, put_back, "the run is restored")

        copy()
        return True

    def mend(self, damage: Damage) -> None:
        """The broker has refused its files: a person puts the whole ones back, or goes on from what is left."""
        loss, disk = damage.accepted, self.machinery.disk
        if loss is None:
            damage.undo()
            disk.damage = None
            return

        def accept() -> None:
            if not self.run_is_over:
                self._kill_all()  # what was just being started
                disk.damage = None
                loss.accept()
                damage.forget()

        self._kill_all()
        self._later(0.5, accept, "the loss is accepted")
