"""What a person says about a new project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["reward", "agent", "environment", "maths", "code", "reasoning_gym"]
Place = Literal["laptop", "gpu", "node", "kubernetes"]

KINDS: Final[Mapping[str, str]] = {
    "reward": "a reward function of your own grades answers to rows of a file",
    "agent": "an agent of your own talks to the model through the openai client",
    "environment": "an environment class of your own, of one turn or several",
    "maths": "questions with a final answer that is compared as mathematics (GSM8K, MATH)",
    "code": "programs, which tests score in a sandbox (bubblewrap)",
    "reasoning_gym": "puzzles that reasoning-gym draws and scores, harder as they are solved: no data at all",
}
WITHOUT_FILES: Final = ("environment", "reasoning_gym")
"""Kinds with tasks of their own."""
PLACES: Final[Mapping[str, str]] = {
    "laptop": "this machine without a GPU",
    "gpu": "one GPU, which learner and rollout share",
    "node": "one machine with several GPUs",
    "kubernetes": "a cluster",
}
NEED_ANSWERS: Final = ("maths", "agent")
"""Kinds whose rows must have one."""
TINY_MODELS: Final[Mapping[bool, str]] = {False: "models/tiny", True: "models/programs"}
"""What `gspo model tiny` makes, by whether it writes programs."""
HUB_MODELS: Final[Mapping[str, str]] = {"gpu": "Qwen/Qwen3-0.6B", "node": "Qwen/Qwen3-8B", "kubernetes": "Qwen/Qwen3-8B"}
"""By place, what is trained where nobody says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Everything that decides what is written."""

    directory: Path
    kind: Kind
    place: Place
    model: str
    """As the configuration has it."""
    hub_name: str = ""
    """Where the Hugging Face hub has the model; empty: not known."""
    num_gpus: int
    """0 for a laptop."""
    gpu_name: str
    data: Path | None = None
    """Rows of the person's own; None: sample rows are written."""
    eval_data: Path | None = None
    prompt_column: str = ""
    answer_column: str = ""
    """Empty: found in the rows."""
    answer_tokens: int | None = None
    """The most tokens of an answer; None: what is usual for the model."""
    manifests: str = ""
    """For a cluster: the way from the directory to deploy/k8s."""
    lora_rank: int = 0
    """Of adapters; 0: all weights are trained."""
    teacher: str = ""
    """A model's directory or a server's URL, for distillation; empty: there is none."""

    @property
    def has_files(self) -> bool:
        """Whether the tasks are rows of files."""
        return self.kind not in WITHOUT_FILES
