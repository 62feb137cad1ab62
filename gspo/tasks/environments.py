"""The interface of an environment: a list of tasks, and episodes that start from a task and proceed turn by turn.

An environment object holds only its options. The state of an episode is plain data that travels with the trajectory, so that
another process, on another machine, can continue from the last acknowledged turn. The broker uses only ``tasks``; the
environment loop uses ``start`` and ``step``. An agent that plays its episodes itself needs no more than a ``TaskSet``.

The environment loop calls ``step`` in its own thread, so it must return at once. Describe a reward that may be slow, hang or
crash as a ``RewardJob``: a rollout has it run in a worker process that can be killed. Needs the extra ``services``.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypedDict

from gspo.extras import needs_extras

with needs_extras(__name__, "services"):
    import msgspec

__all__ = [
    "ChatMessage",
    "DemonstratingEnvironment",
    "DemonstrationMessage",
    "Environment",
    "NoOptions",
    "Plain",
    "RewardForm",
    "RewardJob",
    "Split",
    "Start",
    "State",
    "Step",
    "Task",
    "TaskSet",
    "TaskSource",
]

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""Values that msgpack carries without help."""

Task: TypeAlias = dict[str, Plain]
"""What an episode is about, such as a row of a file."""
State: TypeAlias = dict[str, Plain]
"""Where an episode stands: everything that ``Environment.step`` needs besides the action."""
Split = Literal["train", "eval"]
"""Tasks to train on, or held-out ones."""
RewardForm = Literal["", "verl", "trl", "trl_chat"]
"""How a reward function is called: see ``RewardJob.form``."""


class ChatMessage(TypedDict):
    """One message of a conversation, as chat templates take it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class DemonstrationMessage(NamedTuple):
    """One message of a demonstrated episode; ``train`` marks those that a cold start learns to say."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    train: bool


class RewardJob(msgspec.Struct, frozen=True, kw_only=True):
    """A reward still to be computed: ``function(**arguments)``, sync or async, in a worker process that can be killed.

    The function returns a number, or a map of named components. A service or a grader may stand in its place.
    Raises: ValueError when the fields do not make a job.
    """

    function: str = ""
    """The function's path: "package.module:function"."""
    form: RewardForm = ""
    """How the function is called. "": with the arguments as they are. "verl", "trl", "trl_chat": as those trainers call
    their reward functions. The only argument is then ``completion``; graders add the task, in TRL's with a ``prompt``."""
    url: str = ""
    """In place of a function: a service that gets the arguments as JSON by POST and answers {"reward": ...}."""
    grader: str = ""
    """In place of a function: "programs", which runs a program in the sandbox against tests. Its limits are in its
    arguments, and ``deadline_s`` does not count."""
    arguments: dict[str, Plain]
    with_task: bool = False
    """Add the episode's task to the arguments, as ``task``. A state that held it would travel with every chunk."""
    deadline_s: float = 10.0
    """Wall-clock seconds for the call; starting the worker and importing the function do not count."""
    weights: dict[str, float] | None = None
    """For a function that returns named components: the weight of each; each must be present. None: all weigh 1."""

    def __post_init__(self) -> None:
        if [bool(self.function), bool(self.url), bool(self.grader)].count(True) != 1:
            raise ValueError(
                f"a reward job needs exactly one of function, url and grader: function is {self.function!r}, url is "
                f"{self.url!r}, grader is {self.grader!r}"
            )
        if self.form and not self.function:
            raise ValueError(f'form is "{self.form}", which only a function has: name one, or leave form out')
        if not 0 < self.deadline_s < math.inf:
            raise ValueError(f"deadline_s of a reward job is {self.deadline_s}: expected seconds, above 0")
        for name, weight in (self.weights or {}).items():
            if not math.isfinite(weight):
                raise ValueError(f'the weight of a reward\'s component "{name}" is {weight}: expected a finite number')

    def for_task(self, task: Task) -> RewardJob:
        """Return the job with ``task`` among its arguments if it asks for it. Graders call this."""
        if not (self.with_task or self.form):
            return self
        return msgspec.structs.replace(self, arguments={**self.arguments, "task": task}, with_task=False)

    def for_turn(self, token_ids: Sequence[int]) -> RewardJob:
        """Return the job with the policy's tokens among its arguments if its form has them. Graders call this."""
        if not self.form.startswith("trl"):
            return self
        return msgspec.structs.replace(self, arguments={**self.arguments, "completion_ids": list(token_ids)})

    @property
    def counted(self) -> dict[str, float] | None:
        """``weights``; of verl's form the score alone counts."""
        return {"score": 1.0} if self.form == "verl" and self.weights is None else self.weights


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of an episode: the conversation that the policy answers; it is never trained on."""

    state: State
    messages: list[ChatMessage]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one action."""

    state: State
    messages: list[ChatMessage]
    """Messages that the policy reads next (observation tokens); empty exactly when the episode is done."""
    reward: float | RewardJob
    """For this turn alone: a finite number, also one of NumPy. The episode's return is the sum over its turns."""
    done: bool


class TaskSource(Protocol):
    """Tasks by index: the same index gives the same task, in every process, for ever."""

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are; None when every index from 0 up has one."""
        ...

    def task(self, index: int) -> Task:
        """Return the task at ``index``. Raises: IndexError outside 0 .. num_tasks - 1."""
        ...


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of an environment that has none."""


class TaskSet(ABC):
    """Base of everything that has tasks. Alone it is enough for agents, whose own code plays the episodes.

    A configuration names it as "package.module:ClassName" in ``environment.name``.
    """

    options_type: ClassVar[type[msgspec.Struct]] = NoOptions
    """The argument of ``__init__``: a frozen msgspec struct; a field without a default must be given."""

    def __init__(self, options: msgspec.Struct) -> None:  # noqa: B027 - for classes that have nothing to set
        """Build from checked options, an ``options_type``. A class without options leaves this as it is."""

    @property
    def reward_functions(self) -> Sequence[str | RewardJob]:
        """Functions of its reward jobs, "package.module:function" each: a rollout starts only when they can be imported.

        A job in place of a function: also only when the function takes arguments with the names of that job's.
        """
        return ()

    @property
    def reward_probes(self) -> Sequence[RewardJob]:
        """Jobs with a grader whose reward is 1 if its requirements are installed: a rollout starts only when they
        are."""
        return ()

    @abstractmethod
    def tasks(self, split: Split) -> TaskSource:
        """Return the tasks to train on, or the held-out ones; the two have no task in common."""


class Environment(TaskSet):
    """Base of every environment: tasks, and episodes that the project plays."""

    @abstractmethod
    def start(self, task: Task, seed: int) -> Start:
        """Begin an episode. All its randomness follows from ``seed``, through the state."""

    @abstractmethod
    def step(self, state: State, action: str) -> Step:
        """Take one assistant turn, decoded without special tokens. A bad action is data: it has a reward too.

        Raises: ValueError when ``state`` is not one of this environment's.
        """

    def answer(self, task: Task, action: str) -> str | None:
        """What an episode whose last turn is ``action`` votes for (maj@k), see ``is_same_answer``. None: for nothing.

        An environment without votes leaves this as it is.
        """
        return None

    def is_same_answer(self, task: Task, one: str, other: str) -> bool:
        """Whether two different texts of ``answer`` are votes for the same, such as 1/2 and 2/4. It must return at once."""
        return one == other

    @property
    def needs_reward_model(self) -> bool:
        """Whether its episodes have no reward but the score of ``reward.model``: a rollout starts only with one."""
        return False

    @property
    def has_answers(self) -> bool:
        """Whether its episodes can vote."""
        return type(self).answer is not Environment.answer


class DemonstratingEnvironment(Environment):
    """An environment that can demonstrate episodes, for the supervised cold start of an untrained model."""

    @abstractmethod
    def demonstration(self, rng: random.Random, *, careful: bool) -> list[DemonstrationMessage]:
        """One whole episode of a training task.

        A careful teacher is always right. A careless one knows the method, and is right about a third of the time. A model
        that imitates it has the skill and a bad policy, so reinforcement has something to improve.
        """
