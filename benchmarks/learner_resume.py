"""How long a learner takes from the start of its process to the first batch after a resume, and where the time goes.

    python -m benchmarks.learner_resume --directory /tmp/resume --sizes 2560 1000000

The learner's own parts run in their own process against a real broker process, with ledgers of several lengths. There are
checkpoints of two models, with a quarter of a million and some twenty million parameters, each after one trained batch, so
that the optimizer has a state. Their files are dropped from the page cache before each measurement. The same run reads
their bytes once, as plainly as a disk can be read.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.trained_ledger import GROUP_SIZE, GROUPS_PER_BATCH, num_batches_of, write_ledger
from gspo_services.shared.settings import load_settings, run_fingerprint
from tests.support.broker.process import BrokerProcess
from tests.support.processes.ports import free_port

MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 64},
    "larger": {"hidden_size": 256, "num_hidden_layers": 8, "moe_intermediate_size": 400},
}
STEPS = ("imports", "connection", "model", "deepspeed", "welcome", "checkpoint", "publication", "batch")
READ_BYTES = 1 << 20


def make_checkpoint(model: str, config: Path, batch_position: int) -> int:
    """Make a random model next to ``config``, train it on one batch, save a checkpoint in the run; return its parameters."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from gspo_services.learner.batch_run import Trackers
    from gspo_services.learner.checkpoints import CheckpointState
    from gspo_services.learner.engine import LearnerEngine
    from gspo_services.learner.start import engine_settings_of
    from tests.support.learner.saving import save_checkpoint
    from tests.support.learner.trained import train
    from tests.support.loss.sequences import random_groups

    torch.manual_seed(0)
    settings = load_settings(config)
    shape = Qwen3MoeConfig(
        vocab_size=264, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        tie_word_embeddings=False, **MODELS[model],
    )  # fmt: skip
    policy = Qwen3MoeForCausalLM(shape)
    policy.save_pretrained(settings.model.path)
    engine = LearnerEngine.create(settings.model.path, engine_settings_of(settings, "cpu"))
    trackers = Trackers()
    train(engine, random_groups(8, 8, 0, vocab_size=264), settings.objective, policy_version=1, trackers=trackers)
    mismatch = dict(trackers.mismatch.state_dict())
    state = CheckpointState(policy_version=2, batch_position=batch_position, mismatch=mismatch)
    save_checkpoint(engine, settings.run.directory / "checkpoints", state)
    engine.close()
    return sum(parameter.numel() for parameter in policy.parameters())


class FirstBatch(Exception):
    """Raised at the first batch, which ends the measurement."""


def now() -> tuple[float, float]:
    """Return wall clock and CPU seconds of this process."""
    return time.monotonic(), time.process_time()


def resume(config: Path, begun: float) -> dict[str, tuple[float, float]]:
    """Return wall and CPU seconds of each step of a learner whose start was requested at ``begun`` (monotonic)."""
    import torch
    from prometheus_client import CollectorRegistry

    from gspo.model.policy import load_policy
    from gspo_protocol.messages import Welcome
    from gspo_services.learner.broker import BrokerThread, ToBroker
    from gspo_services.learner.engine import LearnerEngine, init_distributed
    from gspo_services.learner.metrics import LearnerMetrics
    from gspo_services.learner.service import LearnerService
    from gspo_services.learner.start import engine_settings_of
    from gspo_services.shared.runtime.clock import MonotonicClock
    from gspo_services.shared.runtime.logs import configure_logging
    from gspo_services.shared.runtime.telemetry import Health

    configure_logging("learner")
    marks = [(begun, 0.0), now()]

    class MarkedBroker(BrokerThread):
        """Notes the time of each call from the service."""

        def wait_welcome(self, timeout_s: float) -> Welcome | None:
            welcome = super().wait_welcome(timeout_s)
            assert welcome is not None, "the broker runs and must answer at once"
            marks.append(now())
            return welcome

        def tell(self, message: ToBroker) -> None:
            marks.append(now())
            super().tell(message)

    def train(*_: Any, **__: Any) -> Any:
        marks.append(now())
        raise FirstBatch

    settings = load_settings(config)
    clock = MonotonicClock()
    health, metrics = Health(clock, 600.0), LearnerMetrics(CollectorRegistry())
    with MarkedBroker(settings, session="resumed", clock=clock, health=health, metrics=metrics) as broker:
        marks.append(now())
        engine_settings = engine_settings_of(settings, "cpu")
        init_distributed(engine_settings.device)
        model = load_policy(settings.model.path, torch.float32)
        marks.append(now())
        engine = LearnerEngine.from_model(model, engine_settings)
        marks.append(now())
        service = LearnerService(
            settings, engine, broker, clock=clock, health=health, metrics=metrics, stop=threading.Event(), train=train
        )
        try:
            service.run()
        except FirstBatch:
            engine.close()
    assert len(marks) == len(STEPS) + 1, marks
    return dict(
        zip(STEPS, [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(marks)], strict=True)
    )


def checkpoint_files(directory: Path) -> list[Path]:
    return [path for path in sorted((directory / "checkpoints").rglob("*")) if path.is_file()]


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_all(files: list[Path]) -> float:
    """Return the seconds that it takes to read the files once."""
    begin = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass
    return time.perf_counter() - begin


def child(*arguments: str) -> Any:
    """Run this module in a new process; its last line of output is the answer."""
    command = [sys.executable, "-m", "benchmarks.learner_resume", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can be resumed."""

    process: BrokerProcess
    num_parameters: int
    files: list[Path]
    read_s: float


def prepare(directory: Path, model: str, num_trajectories: int) -> Prepared:
    """Make a ledger of that length (or keep an earlier one), and a checkpoint of that model."""
    directory.mkdir(parents=True, exist_ok=True)
    process = BrokerProcess(
        directory,
        {
            "run": {"num_batches": 10**6},
            "batch": {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH, "mini_batches": 4, "max_lag": 2},
            "model": {"path": str(directory / "model")},
            "learner": {"weights_endpoint": f"tcp://127.0.0.1:{free_port()}", "metrics_port": 0},
        },
    )
    last = num_batches_of(num_trajectories) - 1
    if not process.run_directory.exists():
        fingerprint = run_fingerprint(load_settings(process.config))
        write_ledger(process.run_directory, num_trajectories, fingerprint=fingerprint, num_uncheckpointed=1)
    shutil.rmtree(process.run_directory / "checkpoints", ignore_errors=True)
    num_parameters = child("--make", model, "--config", str(process.config), "--batch", str(last))
    files = checkpoint_files(process.run_directory)
    forget(files)
    return Prepared(process=process, num_parameters=num_parameters, files=files, read_s=read_all(files))


async def measure(prepared: Prepared, rounds: int) -> tuple[float, list[dict[str, tuple[float, float]]]]:
    """Return the seconds until the broker serves, and of each step of learners that resume one after the other."""
    process = prepared.process
    begin = time.monotonic()
    await process.start()
    broker_s = time.monotonic() - begin
    steps = []
    try:
        for _ in range(rounds):
            await asyncio.to_thread(forget, prepared.files)
            answer = await asyncio.to_thread(child, "--resume", str(time.monotonic()), "--config", str(process.config))
            steps.append(answer)
    finally:
        await process.kill()
    return broker_s, steps


def measured(directory: Path, model: str, num_trajectories: int, rounds: int) -> dict[str, Any]:
    """Return one row; with several resumes, that of the middle one."""
    prepared = prepare(directory, model, num_trajectories)
    broker_s, steps = asyncio.run(measure(prepared, rounds))
    return {
        "model": model,
        "parameters": prepared.num_parameters,
        "state_bytes": sum(path.stat().st_size for path in prepared.files),
        "read_s": prepared.read_s,
        "trajectories": num_trajectories,
        "broker_s": broker_s,
        "steps": sorted(steps, key=lambda each: sum(wall for wall, _ in each.values()))[len(steps) // 2],
    }


def row(result: dict[str, Any]) -> str:
    steps = result["steps"]
    wall, cpu = (sum(step[place] for step in steps.values()) for place in (0, 1))
    cells = [f"{result['parameters']:,}", f"{result['state_bytes'] / 2**20:.1f}", f"{result['trajectories']:,}"]
    cells += [f"{result['read_s']:.3f}", f"{result['broker_s']:.2f}"]
    cells += [f"{steps[name][0]:.2f} ({steps[name][1]:.2f})" for name in STEPS]
    return f"| {' | '.join(cells)} | {wall:.2f} ({cpu:.2f}) | {result['broker_s'] + wall:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where ledgers, models and checkpoints are made, and kept")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2560, 1_000_000], help="trajectories in the ledger")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="resumes of each kind; the table shows the middle one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--resume", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        print(json.dumps(make_checkpoint(arguments.make, arguments.config, arguments.batch)))
        return
    if arguments.resume:
        print(json.dumps(resume(arguments.config, arguments.resume)))
        return
    if arguments.directory is None:
        parser.error("--directory is missing")
    heads = ["parameters", "state (MiB)", "trajectories in the ledger", "reading the state (s)", "broker", *STEPS]
    print(f"| {' | '.join(heads)} | learner in all | broker and learner |\n|{'---|' * (len(heads) + 2)}")
    results = []
    for size in arguments.sizes:
        for model in arguments.models:
            directory = arguments.directory / f"{size}"
            results.append(measured(directory, model, size, arguments.rounds))
            print(row(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
