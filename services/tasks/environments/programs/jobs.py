"""Reward jobs of the grader "programs": results, and why there is none."""

from __future__ import annotations

from collections.abc import Callable

from gspo.tasks.environments import RewardJob
from gspo_services.shared.runtime.errors import ConfigurationError, UnprovenError
from gspo_services.tasks.environments.programs.grader import ProgramGrader
from gspo_services.tasks.environments.programs.problems import ProgramTest, TaskFault, TestsElsewhere
from gspo_services.tasks.environments.reward_results import RewardResult, no_reward
from gspo_services.tasks.environments.scoring import score_of
from gspo_services.tasks.sandbox import SandboxError, Sandboxes
from gspo_services.tasks.worker.reward_value import UnscoredError


class SandboxedJobs:
    """Computes rewards by running programs; without a sandbox it says of each that it cannot."""

    def __init__(self, sandboxes: Sandboxes | None, read_tests: Callable[[TestsElsewhere], list[ProgramTest]]) -> None:
        """``read_tests``: see ``ProgramGrader``."""
        self._grader = None if sandboxes is None else ProgramGrader(sandboxes, read_tests)

    async def result(self, job: RewardJob) -> RewardResult:
        """The reward of ``job``, or why there is none.

        waits for:    a free sandbox
        unblocked by: the end of other programs, each of which has its limits
        """
        if self._grader is None:
            return no_reward("sandbox", "the job runs a program, and no sandbox is open")
        if job.grader != "programs":
            return no_reward("bad_job", f'there is no grader "{job.grader}": expected "programs"')
        try:
            score = score_of(await self._grader.grade(job.arguments), job.weights)
        except TaskFault as error:
            return no_reward("bad_task", str(error))
        except SandboxError as error:
            return no_reward("sandbox", str(error))
        except UnscoredError as error:
            return no_reward(error.reason, str(error))
        except ValueError as error:
            return no_reward("bad_job", f"the job's arguments are none of a program: {error}")
        return RewardResult(reward=score.reward, components=score.components)

    async def require(self, probe: RewardJob) -> None:
        """Raises: ConfigurationError when ``probe``, a job for a program that must be right, is not worth 1."""
        result = await self.result(probe)
        if result.reward != 1.0:
            ended = ", ".join(name for name, value in result.components.items() if value)
            why = result.detail or f"a trial ended as {ended}"
            error = ConfigurationError if result.failure in ("bad_job", "bad_task") else UnprovenError
            raise error(f'programs in "{probe.arguments.get("language")}" cannot be scored: {why}')
