"""One simulated run: three kinds of processes, their supervisor, the weather, and the audit."""

import asyncio
import contextvars
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from gspo_protocol.messages import RequeueRequest, StopRequest
from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.shared.runtime.errors import DiskDamageError, OccupiedError, ReplacedError, ServiceError, flatten
from tests.simulation.audit.audit import Audit
from tests.simulation.audit.books import Violation
from tests.simulation.episodes import SimEnvironment, SimOptions, plain
from tests.simulation.learner import Poisoned
from tests.simulation.loop import NOBODY, PROCESS, Process, Stuck, VirtualLoop
from tests.simulation.network import Network
from tests.simulation.operator import HOSTILE, OPERATOR, STOPPER, HostileProcess, OperatorProcess
from tests.simulation.plan import STANDBY, Plan, kind_of
from tests.simulation.processes.broker import BrokerProcess
from tests.simulation.processes.host import RESTART_S, Host, Part
from tests.simulation.processes.learner import LearnerProcess
from tests.simulation.processes.machinery import Machinery
from tests.simulation.processes.rollout import RolloutProcess
from tests.simulation.settings import WEIGHTS_ENDPOINTS, rules_of, settings_of
from tests.simulation.storm import Storm
from tests.support.broker.ledger_audit import audit as audit_ledger
from tests.support.learner.checkpoints import find_latest

CALM_S = 150.0
"""After the last event the run must be complete within this many virtual seconds. A process that is asked to stop must do so
within STOP_S."""
STOP_S = 30.0
LOOK_S = 0.5
SHARED_MEMORY = Path("/dev/shm")


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
    """The outcome of a run."""

    plan: Plan
    violation: Violation | None
    history: list[Line]
    happened: Counter[str]
    virtual_s: float


class World(Storm):
    """One run with all its parts. ``directory`` is empty and belongs to it."""

    def __init__(self, plan: Plan, directory: Path, *, log_level: int) -> None:
        self.history: list[Line] = []
        self.violation: Violation | None = None
        self._log_level = log_level
        self._closing = False
        self._lives: Counter[str] = Counter()
        happened: Counter[str] = Counter()
        delays = random.Random(f"threads {plan.seed}")
        loop = VirtualLoop(lambda: delays.uniform(0.0, 0.003))
        loop.set_exception_handler(self._on_loop_error)
        self._broken = asyncio.Event()
        settings = settings_of(plan, directory)
        options = SimOptions(max_turns=plan.max_turns, slow_rewards=plan.slow_rewards, num_tasks=plan.num_tasks)
        self.audit = Audit(rules_of(plan, settings.run.seed, options), happened, self._on_violation)
        self.audit.now = loop.time
        self.audit.dies = self._dies
        network = Network(loop, random.Random(f"network {plan.seed}"), happened)
        machinery = Machinery(settings, SimEnvironment(options), loop, network, self.audit)
        super().__init__(plan, loop, network, machinery, happened)

    # --- the run --------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        with self._logs():
            try:
                self.loop.run_until_complete(self._whole_run())
            except Stuck as error:
                self._on_violation(Violation("liveness", str(error)))
            finally:
                self._bury_all()
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
            self.start(host)
        for event in self.plan.events:
            self.loop.call_at(event.at, self.begin, event, context=NOBODY)
        if not await self._until(self._is_complete, self._deadline) and not self._broken.is_set():
            self._on_violation(Violation("liveness", f"not complete {CALM_S:.0f} s after the weather: {self._state()}"))
            return
        self._closing = True
        for host in self.hosts.values():
            host.stop.set()
        end = self.loop.time() + STOP_S - self.stood_still_s
        if (
            not await self._until(
                lambda: not any(host.task for host in self.hosts.values()), lambda: end + self.stood_still_s
            )
            and not self._broken.is_set()
        ):
            alive = [host.name for host in self.hosts.values() if host.task is not None]
            self._on_violation(Violation("liveness", f"{alive} did not stop within {STOP_S:.0f} s"))
            return
        if not self._broken.is_set():
            self._final_audit()

    async def _until(self, condition: Callable[[], bool], deadline: Callable[[], float]) -> bool:
        """Check regularly until ``condition`` holds. False: it did not in time, or an invariant was broken."""
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
        return last + self.stood_still_s + CALM_S

    def _is_complete(self) -> bool:
        is_over = self.audit.is_stopped or self.audit.durable.num_trained == self.plan.num_batches
        return is_over and (self.machinery.settings.run.directory / "export").is_dir()

    @property
    def run_is_over(self) -> bool:
        return self._closing or self._broken.is_set()

    def _final_audit(self) -> None:
        if self.machinery.disk.damage is not None:  # No broker has started since, which would have found it.
            self.machinery.disk.damage.undo()
        directory = self.machinery.settings.run.directory
        latest = find_latest(directory / "checkpoints")
        assert latest is not None
        self._require_checkpoint(latest)
        lines = (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        self.audit.lines_are_whole(map(json.loads, lines))
        accepted, problems = self.audit.num_losses, audit_ledger(directory).problems
        named = [problem for problem in problems if problem.startswith("loss ")]
        self.audit.require(len(named) == accepted, "the ledger is whole", lambda: f"{accepted} losses, named are {named}")
        others = [problem for problem in problems if problem not in named]
        self.audit.require(not others, "the ledger is whole", lambda: "; ".join(others))
        self.happened["run complete"] += 1

    def _require_checkpoint(self, latest: Path) -> None:
        history = [tuple(step) for step in json.loads((latest / "engine" / "history.json").read_text(encoding="utf-8"))]
        self.audit.run_is_complete(history)

    def _state(self) -> str:
        hosts = {host.name: "up" if host.task else "down" for host in self.hosts.values()}
        durable = self.audit.durable
        return f"version {durable.newest_version}, {len(durable.batches)} batches assembled, {hosts}"

    # --- processes -------------------------------------------------------------------------------------------------------

    def start(self, host: Host) -> None:
        if host.task is not None or not host.wanted or self._closing or self._broken.is_set():
            return
        name = host.peer or host.name
        process = host.process = Process(name, self._lives[name])
        self._lives[name] += 1
        host.stop = asyncio.Event()
        rng = random.Random(f"{process.session} {self.plan.seed}")
        host.part = self._part(name, process, rng)
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        host.task = self.loop.create_task(host.part.run(host.stop), name=process.session, context=context)
        host.task.add_done_callback(lambda task: self._ended(host, process, task), context=NOBODY)
        self.note(host.name, "started", life=process.life)

    def _part(self, name: str, process: Process, rng: random.Random) -> Part:
        if kind_of(name) == "broker":
            return BrokerProcess(self.machinery, process, rng)
        if name in WEIGHTS_ENDPOINTS:
            endpoint = WEIGHTS_ENDPOINTS[name]
            return LearnerProcess(
                self.machinery,
                process,
                rng,
                batch_s=self.plan.batch_s,
                weights_endpoint=endpoint,
                has_tables=self.plan.has_tables,
                is_deterministic=self.plan.is_deterministic,
            )
        if name == OPERATOR:
            return OperatorProcess(self.machinery, process, RequeueRequest(batches=[]))
        if name == STOPPER:
            return OperatorProcess(self.machinery, process, StopRequest(reason="simulated"))
        if name == HOSTILE:
            return HostileProcess(self.machinery, process)
        part = RolloutProcess(
            self.machinery, process, rng, token_s=self.plan.token_s, shares_weights=self.plan.shares_weights
        )
        part.rewards.failing = self.failing_rewards
        return part

    def _ended(self, host: Host, process: Process, task: "asyncio.Task[None]") -> None:
        host.task = None
        self.network.kill(process)
        down_s, host.down_s = host.down_s, RESTART_S
        self.loop.call_later(down_s, self.start, host, context=NOBODY)
        if process.dead:
            return
        error = task.exception()
        self.note(host.name, "ended", error="" if error is None else repr(error))
        if error is not None:
            leaves = flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
            if not all(self._may_end_with(host, leaf) for leaf in leaves):
                texts = "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves)
                self._on_violation(Violation("no process ends by itself", f"{process}: {texts}"))
            if host.once and isinstance(leaves[0], ReplacedError | OccupiedError):
                host.wanted = False

    def _may_end_with(self, host: Host, error: BaseException) -> bool:
        """Whether a process may end so: a rollout gives up on its engine, a process that is asked to stop on what it waits
        for, and one of two rivals on the other."""
        kind = kind_of(host.name)
        if isinstance(error, Poisoned):
            self.happened["learner could not train its batch"] += 1
            return True
        if isinstance(error, ReplacedError | OccupiedError):
            self.happened[f"{kind} {'was replaced' if isinstance(error, ReplacedError) else 'found its place taken'}"] += 1
            rivals = {
                name for name in self.hosts if name.startswith("learner" if kind == "learner" else host.peer or host.name)
            }
            return len(rivals) > 1
        damage = self.machinery.disk.damage if kind == "broker" else None
        if isinstance(error, DiskDamageError) and damage is not None:
            self.happened[f"damage refused: {damage.kind}"] += 1
            self.mend(damage)
            return True
        self.happened[f"{kind} gave up"] += 1
        one_of_two = STANDBY in self.hosts and "another learner uses this run.directory" in str(error)
        return isinstance(error, ServiceError) and (kind == "rollout" or host.stop.is_set() or one_of_two)

    def kill(self, host: Host) -> None:
        process, task = host.process, host.task
        if process is None or task is None:
            return
        process.dead = True
        self.network.kill(process)
        if process.suspended:
            self.loop.resume(process)
        task.cancel()

    def _dies(self, process: Process) -> None:
        """What a process does kills it."""
        for host in self.hosts.values():
            if host.process is process:
                its = "batch" if kind_of(host.name) == "learner" else "trajectory"
                self.happened[f"{kind_of(host.name)} died of its {its}"] += 1
                self.kill(host)

    def _bury_all(self) -> None:
        for host in self.hosts.values():
            host.wanted = False
            self.kill(host)
        pending = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))

    # --- history ---------------------------------------------------------------------------------------------------------

    def note(self, who: str, event: str, **fields: Any) -> None:
        self.history.append(Line(self.loop.time(), who, event, fields))

    def _on_violation(self, violation: Violation) -> None:
        if self.violation is None:
            self.violation = violation
            self.note("audit", f"BROKEN: {violation.invariant}: {violation.text}")
        self._broken.set()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._on_violation(Violation("no error is lost", f"{context['message']}: {context.get('exception')!r}"))

    @contextmanager
    def _logs(self) -> Iterator[None]:
        """Keep the services' log lines as the history."""

        def keep(_: Any, __: str, fields: MutableMapping[str, Any]) -> str:
            process = PROCESS.get()
            event = str(fields.pop("event"))
            error = fields.pop("exc_info", None)
            if error:
                self._on_violation(Violation("no error is lost", f"{process}: {event}: {fields}"))
            self.history.append(Line(self.loop.time(), repr(process), event, dict(fields)))
            self.happened[f"log: {event}"] += 1
            raise structlog.DropEvent

        former = structlog.get_config() if structlog.is_configured() else None
        structlog.configure(
            processors=[keep],
            wrapper_class=structlog.make_filtering_bound_logger(self._log_level),
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            if former is None:
                structlog.reset_defaults()
            else:
                structlog.configure(**former)


def simulate(plan: Plan, *, log_level: int = 20) -> Outcome:
    """Run a plan to its end, or to the first broken invariant."""
    torch.set_num_threads(1)
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="gspo-simulation-", dir=parent))
    try:
        return World(plan, directory, log_level=log_level).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
