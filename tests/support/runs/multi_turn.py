"""Configurations of whole runs in which episodes have several turns."""

from pathlib import Path

from tests.support.processes.run_process import REPOSITORY, RunProcess

MODEL = REPOSITORY / "models" / "tiny"


def multi_turn_run(directory: Path, *overrides: str) -> RunProcess:
    """Several turns and small chunks, so that a kill meets trajectories with acknowledged tokens."""
    return RunProcess(
        REPOSITORY / "examples/calculator.toml",
        directory,
        f"model.path={MODEL}",
        "rollout.chunk_tokens=4",
        "broker.lease_s=5",
        "evaluation.num_tasks=32",
        *overrides,
    )
