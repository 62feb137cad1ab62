"""The environment ``reasoning_gym``: one question, one answer, scored by its generator's verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gspo.tasks.environments import ChatMessage, Environment, RewardJob, Split, Start, State, Step, Task, TaskSource
from gspo_services.tasks.environments.gym.options import AnswerForm, ReasoningGymOptions
from gspo_services.tasks.environments.gym.tasks import GymHeldOut, GymSource, GymTraining
from gspo_services.tasks.gym import SCORE, gym_library

OPENS: Final = "<answer>"
CLOSES: Final = "</answer>"
DEADLINE_OVER_CPU: Final = 12.0
LEAST_DEADLINE_S: Final = 60.0
"""Twice what the verifier's own limits allow: they end it first, and are worth 0."""


class ReasoningGym(Environment):
    """Tasks without data; a score from 0 to 1."""

    options_type = ReasoningGymOptions

    def __init__(self, options: ReasoningGymOptions) -> None:
        """Asks nothing of reasoning-gym: that a broker does, for its tasks."""
        self._options = options

    @property
    def reward_functions(self) -> Sequence[str]:
        """The function that scores."""
        return (SCORE,)

    def tasks(self, split: Split) -> TaskSource:
        """A question is in one split only. Raises: ValueError that names the generator, the parameter and the way out."""
        source = GymSource(self._options, gym_library())
        return GymTraining(source) if split == "train" else GymHeldOut(source, self._options.num_eval_tasks)

    def start(self, task: Task, seed: int) -> Start:
        """Ask the question; nothing in this environment is random."""
        messages: list[ChatMessage] = []
        if self._options.system_prompt:
            messages.append({"role": "system", "content": self._options.system_prompt})
        messages.append({"role": "user", "content": str(task["question"])})
        return Start(state={}, messages=messages)

    def step(self, state: State, action: str) -> Step:
        """Have the answer scored; the episode is over."""
        cpu_s = self._options.cpu_s
        job = RewardJob(
            function=SCORE,
            arguments={"answer": stated_answer(action, self._options.answer_form), "cpu_s": cpu_s},
            with_task=True,
            deadline_s=max(LEAST_DEADLINE_S, DEADLINE_OVER_CPU * cpu_s),
            weights={"score": 1.0},
        )
        return Step(state=state, messages=[], reward=job, done=True)

    def answer(self, task: Task, action: str) -> str | None:
        """The stated answer, with single blanks."""
        said = stated_answer(action, self._options.answer_form)
        return " ".join(said.split()) or None if said is not None else None


def stated_answer(text: str, form: AnswerForm) -> str | None:
    """The answer; None when there is none. As reasoning-gym's ``extract_answer`` finds it, in one pass over the text."""
    if form == "whole":
        return text.strip() or None
    found = None
    begin = text.find(OPENS)
    while begin >= 0:
        end = text.find(CLOSES, begin + len(OPENS))
        if end < 0:
            break
        found = text[begin + len(OPENS) : end].strip()
        begin = text.find(OPENS, end + len(CLOSES))
    return found
