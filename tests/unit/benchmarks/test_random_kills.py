"""Memory of a run's processes: which process is which."""

import importlib.util

import pytest

from benchmarks.random_kills.memory import role_of


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("gspo_services.tasks.reward_worker", "reward"),
        ("gspo_services.broker", "broker"),
        ("gspo_services.learner", "learner"),
        ("gspo_services.rollout", "agent"),
        ("gspo_services.shared.sglang_cpu.launch", "sglang"),
        ("gspo_services.cli.main", "gspo run"),
    ],
)
def test_every_process_of_a_run_has_its_role(module: str, role: str) -> None:
    assert importlib.util.find_spec(module) is not None, "processes are started with other modules now"
    assert role_of(f"/venv/bin/python -m {module} --config run.toml") == role
