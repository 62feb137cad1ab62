"""mini-swe-agent, as it is, repairs small repositories on the episode's computer, and their tests reward it.

`make demo-repair` trains a tiny model. For a real one take the templates of minisweagent/config/mini.yaml.
"""

import contextlib
from typing import Any

import litellm
from litellm.exceptions import ContextWindowExceededError
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from gspo.tasks.agents import Computer, ComputerError, Episode

litellm.suppress_debug_info = True  # Or each answer of a model without a price prints a line.

AGENT = {"system_template": "Repair.", "instance_template": "{{task}}", "step_limit": 6, "cost_limit": 0}
OBSERVATION = "{{output.output}}{{output.exception_info}}"
COMMAND_S = 5


class ComputerEnvironment(LocalEnvironment):
    """Where the agent's commands run, in place of this machine."""

    def __init__(self, computer: Computer) -> None:
        super().__init__(timeout=COMMAND_S)
        self.computer = computer

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: "int | None" = None) -> dict[str, Any]:
        """Run a command of the policy; what is wrong with it the policy is told."""
        try:
            result = self.computer.run_now(action["command"], timeout or self.config.timeout)
            ended = f"ended by its limit: {result.limit}" if result.limit else ""
            output = {"output": result.output, "returncode": result.exit_code, "exception_info": ended}
        except ComputerError as error:
            output = {"output": "", "returncode": None, "exception_info": str(error)}
        self._check_finished(output)
        return output


def solve(episode: Episode) -> float:
    """One repository. Returns the reward: 1 when its tests succeed, else 0."""
    computer, task = episode.computer, episode.task
    computer.write_now({**task["files"], **task["tests"]})
    model = LitellmModel(
        model_name=f"openai/{episode.model}", model_kwargs={"api_base": episode.base_url, "api_key": episode.api_key},
        cost_tracking="ignore_errors", observation_template=OBSERVATION,
    )  # fmt: skip
    with contextlib.suppress(ContextWindowExceededError):
        DefaultAgent(model, ComputerEnvironment(computer), **AGENT).run(task["issue"])
    try:
        # As they were: a policy that changes the tests gains nothing.
        computer.write_now(task["tests"])
    except ComputerError:
        return 0.0
    return float(computer.run_now(task["command"]).exit_code == 0)
