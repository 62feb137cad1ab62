"""Memory of a run's processes: which process is which."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.random_kills.memory import role_of
from gspo_services.tasks.agents.options import worker_command
from gspo_services.tasks.sandbox.walls import bubblewrap_command


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("gspo_services.tasks.reward_worker", "reward"),
        ("gspo_services.broker", "broker"),
        ("gspo_services.learner", "learner"),
        ("gspo_services.tasks.reward_model", "reward model"),
        ("gspo_services.tasks.sandbox.server", "sandbox server"),
        ("gspo_services.rollout", "rollout"),
        ("gspo_services.shared.sglang_cpu.launch", "sglang"),
        ("gspo_services.cli.main", "gspo run"),
    ],
)
def test_every_process_of_a_run_has_its_role(module: str, role: str) -> None:
    assert importlib.util.find_spec(module) is not None, "processes are started with other modules now"
    assert role_of(f"/venv/bin/python -m {module} --config run.toml") == role


def test_processes_with_the_code_of_others_have_their_roles() -> None:
    sandbox = bubblewrap_command(Path("/usr/bin/python3"), [], None)
    assert role_of(" ".join(sandbox)) == "sandbox"
    assert role_of(" ".join(sandbox[sandbox.index("/usr/bin/python3") :])) == "sandbox"
    assert role_of(" ".join(worker_command("/venv/bin/python", '{"function": "my_agent:solve"}'))) == "agent"
