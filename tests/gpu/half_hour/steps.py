"""The steps of the report, the most telling first, in groups that each fit one command of at most nine minutes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.half_hour.run import ENGINE_ARGUMENTS

HERE = Path(__file__).parent
MODELS = Path("/dev/shm/half-hour-models")
GROUP_LIMIT_S = 540.0
PYTEST = [
    "pytest", "-q", "-m", "gpu", "tests/gpu", "--confcutdir=tests/gpu", "-p", "no:cacheprovider",
    "-W", "ignore::pytest.PytestConfigWarning",
]  # fmt: skip
"""Plug-ins and databases that a machine lacks are no reason to run no test there."""


@dataclass(frozen=True)
class Step:
    """One step: a module of this package, or pytest, and the seconds after which it is ended."""

    name: str
    group: int
    words: list[str]
    limit_s: float

    @property
    def command(self) -> list[str]:
        if self.words[0] == "pytest":
            return [sys.executable, "-m", *self.words]
        return [sys.executable, "-m", f"tests.gpu.half_hour.{self.words[0]}", *self.words[1:]]


def steps(tiny: Path, real: Path, work: Path, *, on_cpu: bool = False) -> list[Step]:
    """All of them. ``tiny`` and ``real`` are models; what steps write and need not keep is below ``work``.

    ``on_cpu``: servers as SGLang's platform for a CPU starts them, to try the steps before there is a GPU.
    """

    def server(share: float) -> list[str]:
        return [] if on_cpu else [*ENGINE_ARGUMENTS, "--mem-fraction-static", str(share)]

    def setting(share: float) -> str:
        return "rollout.server_args=" + json.dumps(server(share))

    small, large, words = str(MODELS / "small"), str(MODELS / "30b"), str(HERE / "words.toml")
    half = ['model.dtype="bfloat16"', 'learner.dtype="bfloat16"', "rollout.num_servers=1"]
    demo = ["run", "examples/arithmetic.toml", str(work / "demo"), f"model.path={json.dumps(str(tiny))}"]

    def words_run(name: str, model: str) -> list[str]:
        return ["run", words, str(work / name), f"model.path={json.dumps(model)}"]

    def sums(name: str) -> list[str]:
        return ["run", "examples/smollm2.toml", str(work / name), f"model.path={json.dumps(str(real))}", *half]

    larger = ["batch.groups_per_batch=16", "rollout.max_running=128"]
    short = ["sampling.max_turn_tokens=64", "sampling.max_tokens=128", "run.num_batches=20", "learner.learning_rate=3e-4"]
    experts = ["objective.routing_replay=true", 'objective.routing_replay_from="engine"', "model.float32_head=true"]
    adapters = ["lora.rank=16", 'lora.target_modules=["attention"]', 'lora.publish="adapter"', "learner.learning_rate=1e-4"]
    shared = ["run.colocate=true", "learner.zero_stage=2", "batch.max_lag=1", "run.num_batches=8"]
    return [
        Step("device", 1, ["device"], 60),
        Step("checksum", 1, ["checksum"], 60),
        Step("small-model", 1, ["shapes", small, "--shape", "small"], 40),
        Step("engine", 1, ["engine", small, str(work / "engine.log"), *server(0.3)], 180),
        Step("tests", 1, [*PYTEST, "-k", "not uses_the_gpu"], 200),
        Step("demo", 2, [*demo, *half, setting(0.3)], 200),
        Step("replay-model", 2, ["shapes", small, "--shape", "small"], 20),
        Step("replay-run", 2, [*words_run("replay", small), *experts, *short, setting(0.3)], 160),
        Step("adapter-run", 2, [*sums("adapter"), *adapters, "run.num_batches=12", setting(0.3)], 160),
        Step("real-run", 5, [*sums("real"), *larger, "run.num_batches=160", setting(0.3)], 420),
        Step("large-model", 3, ["shapes", large, "--shape", "30b", "--layers", "2"], 60),
        Step("large-engine", 3, ["engine", large, str(work / "large-engine.log"), *server(0.3)], 240),
        Step("large-run", 3, [*words_run("large", large), setting(0.2)], 240),
        Step("shared-model", 6, ["shapes", large, "--shape", "30b", "--layers", "2"], 60),
        Step("shared-run", 6, [*words_run("shared", large), *shared, setting(0.8)], 300),
        Step("layers-4", 4, ["layers", "4"], 70),
        Step("layers-2-larger-chunks", 4, ["layers", "2", "logprob_chunk_tokens=8192"], 70),
        Step("layers-2-no-checkpointing", 4, ["layers", "2", "activation_checkpointing=false"], 70),
        Step("export", 4, ["export"], 40),
        Step("publication", 4, ["publication"], 60),
        Step("speed", 4, [*PYTEST, "-s", "-k", "uses_the_gpu"], 200),
    ]  # fmt: skip
