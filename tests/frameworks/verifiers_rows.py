"""Rows for environments of verifiers, and the function that plays them."""

from typing import Any

from tests.frameworks.played import ROOT

SOLVE = "gspo.tasks.integrations.verifiers:solve"
TASKSETS = {"PYTHONPATH": f"{ROOT}/tests/frameworks/tasksets:{ROOT}/examples/verifiers_sums"}
SYSTEM = "You sell things."


def odd(kind: str, prompt: str | None = "Go on.", **env: Any) -> dict[str, Any]:
    """A row of ``tests/frameworks/tasksets/odd_tasks_vf.py``."""
    return {
        "env": {"taskset": {"id": "odd_tasks_vf"}, **env},
        "task": {"idx": 0, "prompt": prompt, "system_prompt": SYSTEM, "kind": kind},
    }


ENVIRONMENTS = ROOT / "tests/frameworks/environments"
"""Of github.com/PrimeIntellect-ai/verifiers at commit a60a606e, under its MIT licence; unmodified."""
