"""How long training waits for a published version and a saved checkpoint, in the foreground and in the background.

    python -m benchmarks.training_stalls --json stalls.json

One rank, float32 masters, bfloat16 served. Each model has one process, which trains batches. Between them a version is
copied, hashed and encoded against the version before, and the state is saved: once while training waits and once in the
background. "At once" is the wait without a background: copy, digests and delta; all files on the disk. The seconds of a
batch are measured alone and while a checkpoint is written.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.settings import Objective
from gspo_services.learner.checkpoints import CheckpointSaver, CheckpointState, Threads
from gspo_services.learner.engine import LearnerEngine
from gspo_services.learner.start import EngineSettings
from gspo_services.learner.weights import build_snapshot, copy_parameters, encode_delta
from gspo_services.shared.settings import Learner
from tests.support.learner.trained import train
from tests.support.loss.sequences import random_groups

MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 64},
    "larger": {"hidden_size": 256, "num_hidden_layers": 12, "moe_intermediate_size": 400},
}
SECONDS = (
    "batch", "batch_while_writing", "publish_at_once", "publish_stall", "checkpoint_at_once", "checkpoint_stall",
    "checkpoint_in_all",
)  # fmt: skip


class Measured:
    """One model in training."""

    def __init__(self, model: str, directory: Path) -> None:
        torch.manual_seed(0)
        shape = Qwen3MoeConfig(
            vocab_size=264, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
            tie_word_embeddings=False, **MODELS[model],
        )  # fmt: skip
        policy = Qwen3MoeForCausalLM(shape)
        self.num_parameters = sum(parameter.numel() for parameter in policy.parameters())
        learner = Learner(
            learning_rate=1e-6, zero_stage=1, betas=(0.9, 0.999), max_tokens_per_micro_batch=8192, logprob_chunk_tokens=1024
        )
        self._engine = LearnerEngine.from_model(
            policy, EngineSettings(learner=learner, device="cpu", max_sequence_tokens=None, routing_replay=False, seed=0)
        )
        self._groups = random_groups(4, 4, 0, vocab_size=264)
        self._root = directory / model
        self._version = 1
        self.train()  # Adam creates its state in the first step.
        self._newest = build_snapshot(1, self._copy())

    def train(self) -> None:
        train(self._engine, self._groups, Objective(), policy_version=1)

    def _copy(self) -> Any:
        return copy_parameters(self._engine.served_parameters(torch.bfloat16))

    def publish(self) -> tuple[float, float]:
        """Return the seconds that training waits for a version, in all and for its copy alone."""
        self._version += 1
        begin = time.perf_counter()
        copied = self._copy()
        stall = time.perf_counter() - begin
        snapshot = build_snapshot(self._version, copied)
        encode_delta(self._newest, snapshot)
        self._newest = snapshot
        return time.perf_counter() - begin, stall

    def _saver(self, in_background: bool) -> CheckpointSaver:
        self._version += 1
        return CheckpointSaver(self._engine, self._root, keep=1, background=Threads() if in_background else None)

    def _state(self) -> CheckpointState:
        return CheckpointState(policy_version=self._version, batch_position=self._version, mismatch={})

    def save_at_once(self) -> float:
        saver = self._saver(in_background=False)

        def save() -> None:
            saver.begin(self._state())
            saver.advance()

        return timed(save)

    def save_in_background(self) -> tuple[float, float, list[float]]:
        """Return the seconds that training waits, those until a resume is possible, and those of the batches in between."""
        saver = self._saver(in_background=True)
        begin = time.perf_counter()
        saver.begin(self._state())
        stall = time.perf_counter() - begin
        batches: list[float] = []
        while True:
            now = time.perf_counter()
            path = saver.advance()
            if path is not None:
                return stall + time.perf_counter() - now, time.perf_counter() - begin, batches
            batches.append(timed(self.train))

    def close(self) -> None:
        self._engine.close()


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(model: str, directory: Path, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds."""
    measured = Measured(model, directory)
    found: dict[str, list[float]] = {name: [] for name in SECONDS}
    for _ in range(rounds):
        found["batch"].append(timed(measured.train))
        at_once, stall = measured.publish()
        found["publish_at_once"].append(at_once)
        found["publish_stall"].append(stall)
        found["checkpoint_at_once"].append(measured.save_at_once())
        stall, in_all, batches = measured.save_in_background()
        found["checkpoint_stall"].append(stall)
        found["checkpoint_in_all"].append(in_all)
        found["batch_while_writing"] += batches[:-1] or batches  # the last batch runs partly alone
    measured.close()
    shutil.rmtree(directory / model)
    medians = {f"{name}_s": statistics.median(values) for name, values in found.items() if values}
    return {"model": model, "parameters": measured.num_parameters, "rounds": rounds, **medians}


def in_a_process(model: str, directory: Path, rounds: int) -> dict[str, Any]:
    """Run ``measure`` in a new process: DeepSpeed makes its groups once in each."""
    command = [sys.executable, "-m", "benchmarks.training_stalls", "--one", "--models", model, "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, "--directory", str(directory)], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(result: dict[str, Any]) -> str:
    busy = result.get("batch_while_writing_s")
    cells = [
        f"{result['parameters']:,}",
        f"{result['batch_s']:.3f}",
        "none fits" if busy is None else f"{busy:.3f}",
        *(
            f"{result[f'{kind}_at_once_s']:.3f} | {result[f'{kind}_stall_s']:.3f} | "
            f"{result[f'{kind}_at_once_s'] / result[f'{kind}_stall_s']:.1f}"
            for kind in ("publish", "checkpoint")
        ),
        f"{result['checkpoint_in_all_s']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the table shows medians")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written (default: a temporary directory)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(1)
        print(json.dumps(measure(arguments.models[0], arguments.directory, arguments.rounds)))
        return
    heads = ["parameters", "batch (s)", "batch while writing"]
    heads += [f"{kind}: at once (s) | stall (s) | ratio" for kind in ("version", "checkpoint")]
    heads += ["checkpoint in the background, in all (s)"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * 10}")
    results = []
    with tempfile.TemporaryDirectory(prefix="stalls-") as temporary:
        for model in arguments.models:
            results.append(in_a_process(model, arguments.directory or Path(temporary), arguments.rounds))
            print(row(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
