"""The weather as it strikes: what each kind of event does to the processes, the network, the disk and the engines."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulation.disk.strikes import DiskStorm
from tests.simulation.loop import NOBODY, VirtualLoop
from tests.simulation.network import Network
from tests.simulation.operator import HOSTILE, OPERATOR, STOPPER
from tests.simulation.plan import Event, Plan, Point, kind_of
from tests.simulation.processes.host import Host
from tests.simulation.processes.machinery import Machinery
from tests.simulation.processes.rollout import RolloutProcess
from tests.support.learner.checkpoints import find_latest


class Storm(DiskStorm):
    """A world's weather; the world starts and ends processes."""

    def __init__(
        self, plan: Plan, loop: VirtualLoop, network: Network, machinery: Machinery, happened: Counter[str]
    ) -> None:
        super().__init__(plan, loop, network, machinery, happened)
        self.failing_rewards = 0.0
        self._armed: list[Event] = []
        machinery.audit.passes = self._passes

    def begin(self, event: Event) -> None:
        self.note("weather", str(event))
        handler: Callable[[Event], bool] = getattr(self, f"_on_{event.kind}")
        if handler(event):
            target = kind_of(event.target[0]) if event.target and event.kind in ("kill", "terminate", "suspend") else ""
            self.happened[f"{event.kind} {target}".strip()] += 1

    def _on_stop(self, event: Event) -> bool:
        """An operator stops the run."""
        if STOPPER in self.hosts:
            return False
        host = self.hosts[STOPPER] = Host(STOPPER)
        self.start(host)
        host.wanted = False
        return True

    def _on_kill_when(self, event: Event) -> bool:
        self._armed.append(event)
        return True

    def _passes(self, point: Point) -> None:
        for event in [event for event in self._armed if event.point == point]:
            self._armed.remove(event)
            self.loop.call_later(event.amount, self._strike, event, context=NOBODY)

    def _strike(self, event: Event) -> None:
        if self._on_kill(event):
            self.note("weather", f"{event.target[0]} is killed when {event.point}")
            self.happened[f"killed when {event.point}"] += 1

    def _on_damage_checkpoint(self, event: Event) -> bool:
        """One bit of the newest checkpoint is flipped, and the learner is killed."""
        newest = find_latest(self.machinery.settings.run.directory / "checkpoints")
        if newest is None or self.machinery.audit.durable.num_trained == self.plan.num_batches:
            return False
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
        file = files[int(event.amount * len(files))]
        content = bytearray(file.read_bytes())
        bit = int(event.amount * 7919 * len(files)) % (8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        # Not in place: another checkpoint may have the same file.
        file.unlink()
        file.write_bytes(content)
        self.note("weather", f"bit {bit} of {file.relative_to(newest.parent)} is flipped")
        self._on_kill(event)
        return True

    def _on_terminate(self, event: Event) -> bool:
        host = self.hosts[event.target[0]]
        if host.task is None:
            return False
        host.stop.set()
        return True

    def _on_leave(self, event: Event) -> bool:
        host = self.hosts[event.target[0]]
        if not host.wanted:
            return False
        host.wanted = False
        host.stop.set()

        def come_back() -> None:
            host.wanted = True
            self.start(host)

        self._later(event.seconds, come_back, f"{host.name} comes back")
        return True

    def _on_join(self, event: Event) -> bool:
        if event.target[0] in self.hosts:
            return False
        host = self.hosts[event.target[0]] = Host(event.target[0])
        self.start(host)
        return True

    def _on_second_learner(self, event: Event) -> bool:
        """A second learner is started."""
        name = event.target[-1]
        if name in self.hosts:
            return False
        host = self.hosts[name] = Host(name, once=True)
        self.start(host)
        return True

    def _on_takeover(self, event: Event) -> bool:
        """A second learner waits until the first is killed."""
        if not self._on_second_learner(event):
            return False
        kill = Event(at=event.at, kind="kill", target=("learner",), seconds=event.seconds)
        self._later(event.amount, lambda: self._on_kill(kill), "learner is killed")
        return True

    def _on_second_rollout(self, event: Event) -> bool:
        """A second rollout is started under the name of one that may be alive."""
        first = self.hosts[event.target[0]]
        name = f"{first.name}-again"
        if name in self.hosts or first.task is None:
            return False
        first.once = True
        host = self.hosts[name] = Host(name, peer=first.name, once=True)
        self.start(host)
        return True

    def _on_suspend(self, event: Event) -> bool:
        process = self.hosts[event.target[0]].process
        if process is None or process.dead or process.suspended:
            return False
        process.suspended = True
        self.network.refresh()

        def resume() -> None:
            if process.suspended:
                self.loop.resume(process)
                self.network.refresh()

        self._later(event.seconds, resume, f"{process} resumes")
        return True

    def _on_standstill(self, event: Event) -> bool:
        self.stood_still_s += event.seconds
        self.loop.jump(event.seconds)
        return True

    def _on_partition(self, event: Event) -> bool:
        pair = frozenset(event.target)
        self.network.partitions[pair] += 1
        self.network.refresh()

        def heal() -> None:
            self.network.partitions[pair] -= 1
            self.network.refresh()

        self._later(event.seconds, heal, f"{' and '.join(event.target)} see each other again")
        return True

    def _on_poison(self, event: Event) -> bool:
        """From now on the batch of this index ends whoever handles it."""
        kind: Any = event.target[0]
        self.machinery.audit.poison[int(event.amount)] = kind
        return True

    def _on_deadly(self, event: Event) -> bool:
        """From now on the trajectory with this id ends every rollout that samples it."""
        self.machinery.audit.deadly.add(int(event.amount))
        return True

    def _on_requeue(self, event: Event) -> bool:
        """An operator requeues whatever is quarantined."""
        host = self.hosts.setdefault(OPERATOR, Host(OPERATOR))
        host.wanted = True
        self.start(host)
        host.wanted = False
        return True

    def _on_hostile(self, event: Event) -> bool:
        """A peer that the broker admits breaks every rule for a while."""
        host = self.hosts.setdefault(HOSTILE, Host(HOSTILE))
        host.wanted = True
        self.start(host)
        host.wanted = False
        return True

    def _on_half_open(self, event: Event) -> bool:
        one, other = event.target
        return self.network.half_open(one, other) > 0

    def _on_loss(self, event: Event) -> bool:
        self.network.loss = event.amount

        def end() -> None:
            self.network.loss = 0.0

        self._later(event.seconds, end, "no more loss")
        return True

    def _on_duplication(self, event: Event) -> bool:
        self.network.duplication = event.amount

        def end() -> None:
            self.network.duplication = 0.0

        self._later(event.seconds, end, "no more duplication")
        return True

    def _on_corrupt(self, event: Event) -> bool:
        """The weights that it sends are not those that it has."""
        self.network.corruption |= dict.fromkeys(event.target, event.amount)

        def end() -> None:
            for name in event.target:
                self.network.corruption.pop(name, None)

        self._later(event.seconds, end, f"{' and '.join(event.target)} send correct weights again")
        return True

    def _on_slow(self, event: Event) -> bool:
        (name,) = event.target
        self.network.slow_s[name] = event.amount

        def end() -> None:
            self.network.slow_s.pop(name, None)

        self._later(event.seconds, end, f"{name} is fast again")
        return True

    def _on_rewards_fail(self, event: Event) -> bool:
        def fail(probability: float) -> None:
            self.failing_rewards = probability
            for host in self.hosts.values():
                if isinstance(host.part, RolloutProcess):
                    host.part.rewards.failing = probability

        fail(event.amount)
        self._later(event.seconds, lambda: fail(0.0), "rewards work again")
        return self.plan.slow_rewards or bool(self.plan.agents) or self.plan.compares

    def _on_engine_fails(self, event: Event) -> bool:
        return self._of_engine(event, "fails")

    def _on_engine_fails_update(self, event: Event) -> bool:
        return self._of_engine(event, "fails_update")

    def _on_engine_damages(self, event: Event) -> bool:
        return self._of_engine(event, "damages")

    def _on_engine_lies(self, event: Event) -> bool:
        return self._of_engine(event, "lies")

    def _of_engine(self, event: Event, what: str) -> bool:
        part = self.hosts[event.target[0]].part
        if not isinstance(part, RolloutProcess):
            return False  # lost with its run
        setattr(part.engine, what, int(event.amount))
        return True

    def _on_engine_dies(self, event: Event) -> bool:
        """The rollout ends with its server; its supervisor starts it again."""
        host = self.hosts[event.target[0]]
        if host.task is None:
            return False
        assert isinstance(host.part, RolloutProcess)
        host.part.engine.dead = True
        host.down_s = event.seconds
        self._later(0.2, lambda: self.kill(host), f"{host.name} ends with its engine")
        return True
