"""One simulated run: three kinds of processes, their supervisor, the weather, and the audit of it all."""

import asyncio
import contextvars
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch

from services.learner.checkpoint import find_latest
from services.runtime.lifecycle import ServiceError, flatten
from services.runtime.settings import (
    BatchSection,
    Broker,
    Evaluation,
    Learner,
    Model,
    Rollout,
    Run,
    Sampling,
    Settings,
)
from tests.simulation.audit import Audit, Rules, Violation
from tests.simulation.episodes import SimEnvironment, SimOptions, plain
from tests.simulation.loop import NOBODY, PROCESS, Process, Stuck, VirtualLoop
from tests.simulation.network import Network
from tests.simulation.processes import BrokerProcess, LearnerProcess, Machinery, RolloutProcess
from tests.simulation.weather import Event, Plan, Point
from tests.support.ledger_audit import audit as audit_ledger

CALM_S = 300.0
"""After the last event the run must be complete within so many virtual seconds, and every process must stop within
STOP_S when it is asked to."""
STOP_S = 30.0
RESTART_S = 1.0
LOOK_S = 0.5
SHARED_MEMORY = Path("/dev/shm")

Part = BrokerProcess | RolloutProcess | LearnerProcess


@dataclass(frozen=True)
class Line:
    """One event of a run's history."""

    at: float
    who: str
    event: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.at:9.3f}  {self.who:<14} {self.event} {plain(self.fields)}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run."""

    plan: Plan
    violation: Violation | None
    history: list[Line]
    happened: Counter[str]
    virtual_s: float


@dataclass
class Host:
    """A place where one process lives, life after life."""

    name: str
    wanted: bool = True
    """It is started again when it ends."""
    lives: int = 0
    process: Process | None = None
    part: Part | None = None
    task: "asyncio.Task[None] | None" = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    down_s: float = RESTART_S
    """From its end to its next start."""


class World:
    """Everything of one run. ``directory`` is empty and belongs to it."""

    def __init__(self, plan: Plan, directory: Path, *, log_level: int) -> None:
        self.plan = plan
        self.history: list[Line] = []
        self.happened: Counter[str] = Counter()
        self.violation: Violation | None = None
        rng = random.Random(f"world {plan.seed}")
        delays = random.Random(f"threads {plan.seed}")
        self.loop = VirtualLoop(lambda: delays.uniform(0.0, 0.003))
        self.loop.set_exception_handler(self._on_loop_error)
        self._rng = rng
        settings = settings_of(plan, directory)
        environment = SimEnvironment(SimOptions(max_turns=plan.max_turns, slow_rewards=plan.slow_rewards))
        rules = Rules(
            seed=settings.run.seed,
            num_batches=plan.num_batches,
            group_size=plan.group_size,
            groups_per_batch=plan.groups_per_batch,
            max_lag=plan.max_lag,
            max_attempts=plan.max_attempts,
            options=environment._options,
        )
        self.audit = Audit(rules, self.happened, self._on_violation)
        self.network = Network(self.loop, random.Random(f"network {plan.seed}"), self.happened)
        self.machinery = Machinery(settings, environment, self.loop, self.network, self.audit)
        names = ["broker", "learner", *(f"rollout-{index}" for index in range(plan.num_rollouts))]
        self.hosts = {name: Host(name) for name in names}
        self._broken = asyncio.Event()
        self._failing_rewards = 0.0
        self._armed: list[Event] = []
        self._stood_still_s = 0.0
        self._closing = False
        self.audit.passes = self._passes
        self._log_level = log_level

    # --- the run --------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        with self._logs():
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._whole_run())
            except Stuck as error:
                self._on_violation(Violation("liveness", str(error)))
            finally:
                self._bury_all()
                asyncio.set_event_loop(None)
                self.loop.close()
        return Outcome(
            plan=self.plan,
            violation=self.violation,
            history=self.history,
            happened=self.happened,
            virtual_s=self.loop.time(),
        )

    async def _whole_run(self) -> None:
        for host in self.hosts.values():
            self._start(host)
        for event in self.plan.events:
            self.loop.call_at(event.at, self._begin, event, context=NOBODY)
        if not await self._until(self._is_complete, self._deadline) and not self._broken.is_set():
            self._on_violation(Violation("liveness", f"not complete {CALM_S:.0f} s after the weather: {self._state()}"))
            return
        self._closing = True
        for host in self.hosts.values():
            host.stop.set()
        end = self.loop.time() + STOP_S
        if (
            not await self._until(lambda: not any(host.task for host in self.hosts.values()), lambda: end)
            and not self._broken.is_set()
        ):
            alive = [host.name for host in self.hosts.values() if host.task is not None]
            self._on_violation(Violation("liveness", f"{alive} did not stop within {STOP_S:.0f} s"))
            return
        if not self._broken.is_set():
            self._final_audit()

    async def _until(self, condition: Callable[[], bool], deadline: Callable[[], float]) -> bool:
        """Look around regularly until ``condition`` holds. False: it did not in time, or an invariant was broken."""
        while not self._broken.is_set():
            for host in self.hosts.values():
                if host.part is not None:
                    host.part.check_bounds()
            if condition():
                return True
            if self.loop.time() > deadline():
                return False
            await asyncio.sleep(LOOK_S)
        return False

    def _deadline(self) -> float:
        last = max(
            (event.at + (event.seconds if event.kind != "standstill" else 0) for event in self.plan.events), default=0.0
        )
        return last + self._stood_still_s + CALM_S

    _stood_still_s = 0.0

    def _is_complete(self) -> bool:
        durable = self.audit.durable
        trained = durable.versions[durable.newest_version].trained_batches if durable.versions else 0
        return trained == self.plan.num_batches and (self.machinery.settings.run.directory / "export").is_dir()

    def _final_audit(self) -> None:
        directory = self.machinery.settings.run.directory
        latest = find_latest(directory / "checkpoints")
        assert latest is not None
        self._require_checkpoint(latest)
        found = audit_ledger(directory)
        self.audit.require(not found.problems, "the ledger is whole", lambda: "; ".join(found.problems))
        self.happened["run complete"] += 1

    def _require_checkpoint(self, latest: Path) -> None:
        history = [tuple(step) for step in json.loads((latest / "engine" / "history.json").read_text(encoding="utf-8"))]
        self.audit.run_is_complete(history)

    def _state(self) -> str:
        hosts = {host.name: "up" if host.task else "down" for host in self.hosts.values()}
        durable = self.audit.durable
        return f"version {durable.newest_version}, {len(durable.batches)} batches assembled, {hosts}"

    # --- processes -------------------------------------------------------------------------------------------------------

    def _start(self, host: Host) -> None:
        if host.task is not None or not host.wanted or self._closing or self._broken.is_set():
            return
        process = host.process = Process(host.name, host.lives)
        host.lives += 1
        host.stop = asyncio.Event()
        rng = random.Random(f"{process.session} {self.plan.seed}")
        host.part = self._part(host.name, process, rng)
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        host.task = self.loop.create_task(host.part.run(host.stop), name=process.session, context=context)
        host.task.add_done_callback(lambda task: self._ended(host, process, task), context=NOBODY)
        self._note(host.name, "started", life=process.life)

    def _part(self, name: str, process: Process, rng: random.Random) -> Part:
        if name == "broker":
            return BrokerProcess(self.machinery, process, rng)
        if name == "learner":
            return LearnerProcess(self.machinery, process, rng, batch_s=self.plan.batch_s)
        part = RolloutProcess(self.machinery, process, rng, token_s=self.plan.token_s)
        part.rewards.failing = self._failing_rewards
        return part

    def _ended(self, host: Host, process: Process, task: "asyncio.Task[None]") -> None:
        host.task = None
        self.network.kill(process)
        down_s, host.down_s = host.down_s, RESTART_S
        self.loop.call_later(down_s, self._start, host, context=NOBODY)
        if process.dead:
            return
        error = task.exception()
        self._note(host.name, "ended", error="" if error is None else repr(error))
        if error is not None:
            leaves = flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
            # A rollout may give up on its engine, and whoever is asked to stop on what it waited for.
            may = host.name.startswith("rollout") or host.stop.is_set()
            expected = may and all(isinstance(leaf, ServiceError) for leaf in leaves)
            if not expected:
                texts = "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves)
                self._on_violation(Violation("no process ends by itself", f"{process}: {texts}"))
            self.happened["rollout gave up"] += 1

    def _kill(self, host: Host) -> None:
        process, task = host.process, host.task
        if process is None or task is None:
            return
        process.dead = True
        self.network.kill(process)
        if process.suspended:
            self.loop.resume(process)
        task.cancel()

    def _bury_all(self) -> None:
        for host in self.hosts.values():
            host.wanted = False
            self._kill(host)
        pending = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))

    # --- the weather -------------------------------------------------------------------------------------------------------

    def _begin(self, event: Event) -> None:
        self._note("weather", str(event))
        handler: Callable[[Event], bool] = getattr(self, f"_on_{event.kind}")
        if handler(event):
            target = event.target[0].split("-")[0] if event.target and event.kind in ("kill", "terminate", "suspend") else ""
            self.happened[f"{event.kind} {target}".strip()] += 1

    def _later(self, seconds: float, what: Callable[[], None], note: str) -> None:
        def end() -> None:
            self._note("weather", note)
            what()

        self.loop.call_later(seconds, end, context=NOBODY)

    def _on_kill(self, event: Event) -> bool:
        host = self.hosts[event.target[0]]
        if host.task is None:
            return False
        host.down_s = event.seconds
        self._kill(host)
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
            self._note("weather", f"{event.target[0]} is killed when {event.point}")
            self.happened[f"killed when {event.point}"] += 1

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
            self._start(host)

        self._later(event.seconds, come_back, f"{host.name} comes back")
        return True

    def _on_join(self, event: Event) -> bool:
        if event.target[0] in self.hosts:
            return False
        host = self.hosts[event.target[0]] = Host(event.target[0])
        self._start(host)
        return True

    def _on_suspend(self, event: Event) -> bool:
        process = self.hosts[event.target[0]].process
        if process is None or process.dead or process.suspended:
            return False
        process.suspended = True
        self.network.refresh()

        def go_on() -> None:
            if process.suspended:
                self.loop.resume(process)
                self.network.refresh()

        self._later(event.seconds, go_on, f"{process} goes on")
        return True

    def _on_standstill(self, event: Event) -> bool:
        self._stood_still_s += event.seconds
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

    def _on_slow(self, event: Event) -> bool:
        (name,) = event.target
        self.network.slow_s[name] = event.amount
        self._later(event.seconds, lambda: self.network.slow_s.pop(name, None) and None, f"{name} is fast again")
        return True

    def _on_disk_full(self, event: Event) -> bool:
        self.machinery.disk.full = True

        def end() -> None:
            self.machinery.disk.full = False

        self._later(event.seconds, end, "the disk has room again")
        return True

    def _on_rewards_fail(self, event: Event) -> bool:
        def fail(probability: float) -> None:
            self._failing_rewards = probability
            for host in self.hosts.values():
                if isinstance(host.part, RolloutProcess):
                    host.part.rewards.failing = probability

        fail(event.amount)
        self._later(event.seconds, lambda: fail(0.0), "rewards work again")
        return self.plan.slow_rewards

    def _on_engine_fails(self, event: Event) -> bool:
        return self._of_engine(event, "fails")

    def _on_engine_fails_update(self, event: Event) -> bool:
        return self._of_engine(event, "fails_update")

    def _on_engine_damages(self, event: Event) -> bool:
        return self._of_engine(event, "damages")

    def _of_engine(self, event: Event, what: str) -> bool:
        part = self.hosts[event.target[0]].part
        assert isinstance(part, RolloutProcess)
        setattr(part.engine, what, int(event.amount))
        return True

    def _on_engine_dies(self, event: Event) -> bool:
        """The rollout's entry point ends with its server; its supervisor starts it afresh."""
        host = self.hosts[event.target[0]]
        if host.task is None:
            return False
        assert isinstance(host.part, RolloutProcess)
        host.part.engine.dead = True
        host.down_s = event.seconds
        self._later(0.2, lambda: self._kill(host), f"{host.name} ends with its engine")
        return True

    # --- history ---------------------------------------------------------------------------------------------------------

    def _note(self, who: str, event: str, **fields: Any) -> None:
        self.history.append(Line(self.loop.time(), who, event, fields))

    def _on_violation(self, violation: Violation) -> None:
        if self.violation is None:
            self.violation = violation
            self._note("audit", f"BROKEN: {violation.invariant}: {violation.text}")
        self._broken.set()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._on_violation(Violation("no error is lost", f"{context['message']}: {context.get('exception')!r}"))

    @contextmanager
    def _logs(self) -> Iterator[None]:
        """The services' own log lines are the history."""

        def keep(_: Any, __: str, fields: dict[str, Any]) -> Any:
            process = PROCESS.get()
            event = str(fields.pop("event"))
            error = fields.pop("exc_info", None)
            if error:
                self._on_violation(Violation("no error is lost", f"{process}: {event}: {fields}"))
            self.history.append(Line(self.loop.time(), repr(process), event, fields))
            self.happened[f"log: {event}"] += 1
            raise structlog.DropEvent

        former = structlog.get_config()
        structlog.configure(
            processors=[keep],
            wrapper_class=structlog.make_filtering_bound_logger(self._log_level),
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.configure(**former)


def settings_of(plan: Plan, directory: Path) -> Settings:
    """The run's configuration file, so to speak."""
    model = directory / "model"
    model.mkdir()
    return Settings(
        run=Run(directory=directory, num_batches=plan.num_batches, seed=plan.seed % 2**31),
        model=Model(path=model),
        sampling=Sampling(max_turn_tokens=plan.max_turn_tokens, max_tokens=plan.max_tokens),
        batch=BatchSection(
            group_size=plan.group_size, groups_per_batch=plan.groups_per_batch, mini_batches=1, max_lag=plan.max_lag
        ),
        evaluation=Evaluation(every_batches=plan.evaluate_every_batches, num_tasks=plan.num_eval_tasks),
        broker=Broker(
            work_endpoint="tcp://127.0.0.1:1",
            batch_endpoint="tcp://127.0.0.1:2",
            lease_s=plan.lease_s,
            max_attempts=plan.max_attempts,
            failure_budget=1000,
            commit_interval_s=plan.commit_interval_s,
        ),
        rollout=Rollout(
            max_running=plan.max_running, chunk_tokens=plan.chunk_tokens, pause_mode=plan.pause_mode, drain_s=5.0
        ),
        learner=Learner(weights_endpoint="tcp://127.0.0.1:3", checkpoint_every_batches=plan.checkpoint_every_batches),
    )


def simulate(plan: Plan, *, log_level: int = 20) -> Outcome:
    """Run a plan to its end, or to the first broken invariant."""
    torch.set_num_threads(1)
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="gspo-simulation-", dir=parent))
    try:
        return World(plan, directory, log_level=log_level).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
