"""What the audit knows of one run of an agent: what its lease brought, what it asked, got, did and earned."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from tests.simulation.agents.chat import Conversation

Answer = tuple[int, ...]


class Step(NamedTuple):
    """A step in the journal."""

    name: str
    arguments: str
    result: object


@dataclass(kw_only=True)
class AgentRun:
    """One run of an agent's code, under one lease."""

    session: str
    trajectory_id: int
    epoch: int
    replays: bool
    """What the lease brought is to be repeated."""
    recorded: Mapping[Conversation, Sequence[Answer]]
    """By question: what the lease brought of its answers, in their order."""
    steps: Sequence[Step]
    """What the lease brought of the journal."""
    asked: Counter[Conversation] = field(default_factory=Counter)
    open: Counter[Conversation] = field(default_factory=Counter)
    beside: set[Conversation] = field(default_factory=set)
    """Questions that were asked while an equal one was under way."""
    sampled: Counter[tuple[Conversation, int]] = field(default_factory=Counter)
    """By question and place in the answer: how many tokens the engine sampled there in this run."""
    seen: Counter[tuple[Conversation, Answer]] = field(default_factory=Counter)
    """The answers that the agent got."""
    num_steps: int = 0
    follows_steps: bool = True
    """Whether its steps are those of the lease, so far."""
    earned: tuple[float, Mapping[str, float]] | None = None
    """Reward and components, once it has returned."""

    def asks(self, question: Conversation) -> None:
        """A call begins."""
        self.asked[question] += 1
        self.open[question] += 1
        if self.open[question] > 1:
            self.beside.add(question)

    def gets(self, question: Conversation, answer: Answer) -> bool:
        """The call is answered. False: it is not with what the lease brought of this call, gone on with to its end.

        Equal calls get what was recorded in its order, and in any order where they were under way at the same time.
        """
        self.open[question] -= 1
        recorded = list(self.recorded.get(question, ()))
        got = [seen for (asked, seen), number in self.seen.items() for _ in range(number) if asked == question]
        self.seen[question, answer] += 1
        if question not in self.beside:
            return len(got) >= len(recorded) or _goes_on(answer, recorded[len(got)])
        num_new = 0
        for each in (*got, answer):
            begun = max((begin for begin in recorded if _goes_on(each, begin)), key=len, default=None)
            if begun is None:
                num_new += 1
            else:
                recorded.remove(begun)
        return num_new <= max(0, self.asked[question] - len(self.recorded.get(question, ())))

    def num_recorded(self, question: Conversation, place: int) -> int:
        """How many answers to ``question`` had a token at ``place`` when the lease came."""
        return sum(len(answer) > place for answer in self.recorded.get(question, ()))

    def recorded_step(self) -> Step | None:
        """What the lease has in the place of the next step, if the agent has not left it before."""
        return self.steps[self.num_steps] if self.follows_steps and self.num_steps < len(self.steps) else None


def _goes_on(answer: Answer, begun: Answer) -> bool:
    return answer[: len(begun)] == begun


def steps_in(journal: Sequence[bytes]) -> list[Step]:
    """The steps that are valid at the end of a journal: one replaces a former one of its place, and all that followed."""
    steps: list[Step] = []
    for entry in journal:
        step = msgpack.unpackb(entry).get("step")
        if step is not None:
            steps[step["ordinal"] :] = [Step(step["name"], step["arguments"], step["result"])]
    return steps


def by_question(answers: Sequence[tuple[Conversation, Answer]]) -> dict[Conversation, list[Answer]]:
    found: defaultdict[Conversation, list[Answer]] = defaultdict(list)
    for question, answer in answers:
        found[question].append(answer)
    return dict(found)
