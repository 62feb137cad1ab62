"""Tasks of an agent, with options that hold secrets."""

import msgspec

from gspo.tasks.environments import Split, Task, TaskSet, TaskSource


class SecretOptions(msgspec.Struct, frozen=True):
    """What a user's own tasks may need."""

    api_key: str
    deep: dict[str, str]


class _Tasks:
    num_tasks = 8

    def task(self, index: int) -> Task:
        return {"number": index}


class SecretTasks(TaskSet):
    """Eight tasks, in both splits."""

    options_type = SecretOptions

    def tasks(self, split: Split) -> TaskSource:
        return _Tasks()
