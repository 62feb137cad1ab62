"""An environment whose tasks cannot be leased."""

from gspo.tasks.environments import Environment, Split, Start, State, Step, Task, TaskSource


class _Tasks:
    num_tasks = None

    def task(self, index: int) -> Task:
        if index % 2:
            raise KeyError(f"row {index}")
        return {"text": "x" * (2 << 20)}


class OddTasks(Environment):
    """Every other task is too large for a message, the others cannot be read."""

    def tasks(self, split: Split) -> TaskSource:
        return _Tasks()

    def start(self, task: Task, seed: int) -> Start:
        raise NotImplementedError

    def step(self, state: State, action: str) -> Step:
        raise NotImplementedError
