"""What comes of a reward job, and the options of the workers that compute it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gspo_services.tasks.worker.reward_value import UnscoredReason

FailureReason = Literal[
    UnscoredReason, "wrong_length", "deadline", "cpu_time", "memory", "crashed", "raised", "unknown_function", "bad_job",
    "too_large", "no_result", "unreachable", "refused", "closed", "bad_task", "sandbox", "no_reward", "truncated",
]  # fmt: skip
"""Why a job has no reward. wrong_length: a group's rewards are not one for each answer. unknown_function: it cannot be
imported. bad_job: its arguments are not plain data. no_result, unreachable, refused: a service answered with no JSON, could
not be reached, or answered with an error. bad_task: the task's tests or its checker are wrong. sandbox: no program could be
run, or a compiler is missing. no_reward: a function of TRL's form returned None. truncated: the reward model read the
beginning alone; there is a reward."""


RewardPart = Literal["wait", "work", "model"]
"""Of a reward's time: until a worker is free, and then until the result; services have no wait. model: the reward model's
score, with its wait."""


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job. A trajectory without a reward is dropped with the reason; it never gets 0."""

    reward: float | None
    """Finite; None when there is none."""
    components: dict[str, float] = {}
    """The parts of the reward by name, without their weights; empty for a function that returns one number."""
    of_answers: list[RewardResult] = []
    """Of a job that compares the answers of a group: what each is worth. Then ``reward`` is None."""
    failure: FailureReason | None = None
    """Why there is no reward, or why it is 0 (``RewardPoolOptions.on_deadline``)."""
    detail: str = ""


class RewardPoolOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers there are, and what each may use."""

    num_workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 2
    memory_bytes: Annotated[int, msgspec.Meta(ge=128 * 1024 * 1024)] = 6 * 1024**3
    """Address space of one worker, libraries included."""
    cpu_s: Annotated[int, msgspec.Meta(ge=1)] = 60
    """CPU seconds of one job, for each of its processes; its deadline is a separate limit."""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """The limit for a worker to start and import the job's function."""
    max_jobs_per_worker: Annotated[int, msgspec.Meta(ge=1)] = 2_000
    """A worker is replaced after this many jobs, because symbolic algebra fills caches that are never emptied."""
    environment: dict[str, str] = {}
    """Variables for reward code. Of ours it gets only those that an interpreter needs, and no token or key."""
    network: bool = False
    """Let reward code reach the network: for a reward that asks a service. Then nothing here limits what it may reach."""
    scratch: bool = False
    """Give each job a folder for its files, as TMPDIR and GSPO_SCRATCH, removed after it. False: no file can be written."""
    scratch_file_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 * 1024 * 1024
    """The size of one file of a job with ``scratch``."""
    on_deadline: Literal["fail", "zero"] = "fail"
    """A job over its deadline or its CPU time. fail: it has no reward. zero: its reward is 0, for code of the policy that is
    meant to be fast."""


def no_reward(reason: FailureReason, detail: str) -> RewardResult:
    """A job without a reward."""
    return RewardResult(reward=None, failure=reason, detail=detail)
