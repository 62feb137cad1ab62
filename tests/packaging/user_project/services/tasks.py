"""An environment of the user, and its reward."""

from utils import LOWEST

from gspo.tasks.environments import Environment, RewardJob, Split, Start, State, Step, Task
from services.scoring import close


class Numbers:
    """Every index has a task."""

    num_tasks = None

    def task(self, index: int) -> Task:
        return {"word": str(index)}


def grade(answer: str) -> float:
    """3 or 4: by what nothing else here gives."""
    return LOWEST + len(answer) % 2 * close(answer, answer)


class Words(Environment):
    """Say the word again."""

    def tasks(self, split: Split) -> Numbers:
        return Numbers()

    def start(self, task: Task, seed: int) -> Start:
        return Start(state=task, messages=[{"role": "user", "content": str(task["word"])}])

    def step(self, state: State, action: str) -> Step:
        reward = RewardJob(function="services.tasks:grade", arguments={"answer": action})
        return Step(state=state, messages=[], reward=reward, done=True)
