"""Runs alone: the peak of one rank's steps on paper.

python -m tests.support.paper.peak_worker CASE.json; the case is a ``Case``. Writes CASE.out, with ``Peak``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from torch._subclasses.fake_tensor import unset_fake_temporarily as unfaked
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.model.packing import PackedBatch
from gspo_services.broker.upkeep import return_freed_memory
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.start.engine_settings import Device, EngineSettings
from gspo_services.learner.weights import DTYPES
from gspo_services.shared.runtime.lifecycle import leave
from gspo_services.shared.settings.sections import Learner, LoraSection
from tests.support.learner.gpu_worker import policy_gradient, random_row
from tests.support.paper.fake_ranks import fake_ranks
from tests.support.paper.held import Held
from tests.support.paper.shapes import MODELS
from tests.support.starts.start_worker import forget_peak, free_at_once, resident_bytes

NUM_SEQUENCES: Final = 8
STEPS: Final = 3
"""ZeRO 3 records the order of layers in the first, and fetches ahead from then on. Moments exist after the first."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout of one model."""

    model: str
    num_ranks: int = 1
    tokens: int = 16_384
    layers: int | None = None
    """Only so many."""
    micro_batches: int = 2
    """Of a step: from the second on, there are sums of gradients beside its activations."""
    learner: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    device: Device = "cuda"
    is_real: bool = False
    """With values, on the host, where the peak is that of the process."""

    config_changes: dict[str, Any] = field(default_factory=dict)
    """Of the model's config.json."""

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        config = {key: value for key, value in MODELS[self.model].items() if key != "architectures"}
        config |= self.config_changes
        return config if self.layers is None else config | {"num_hidden_layers": self.layers}

    def section(self) -> dict[str, Any]:
        """The section ``learner``: what it says, and else what the project's own runs on GPUs have."""
        given = {"dtype": "bfloat16", "activation_checkpointing": True, "zero_stage": 3, "num_ranks": self.num_ranks}
        return given | {"max_tokens_per_micro_batch": self.tokens, "logprob_chunk_tokens": 1024} | self.learner


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of one rank's tensors."""

    at_rest: int
    """Between two steps."""
    peak: int
    """Within a step."""
    sent: dict[str, int]
    """In the collectives of one step, by kind."""
    seconds: float


def peak_of(case: Case) -> Peak:
    """Make ``STEPS`` steps on paper."""
    begin = time.monotonic()
    with fake_ranks(case.num_ranks, on_gpu=case.device == "cuda"), Held() as held:
        engine, packed = engine_of(case)
        # No value says whether there was a gradient.
        engine._coverage_known = True
        for _ in range(STEPS):
            held.peak, before = held.now, held.sent.copy()
            engine.train_mini_batch([packed] * case.micro_batches, policy_gradient)
        sent = {name: count - before[name] for name, count in held.sent.items() if count > before[name]}
        return Peak(at_rest=held.now, peak=held.peak, sent=sent, seconds=time.monotonic() - begin)


def real_peak_of(case: Case) -> Peak:
    """Make the same steps with values. What the process had before does not count."""
    begin, before = time.monotonic(), resident_bytes()
    engine, packed = engine_of(case)
    for _ in range(STEPS):
        return_freed_memory()
        forget_peak()
        engine.train_mini_batch([packed] * case.micro_batches, policy_gradient)
    peak = resident_bytes("VmHWM") - before
    return_freed_memory()
    return Peak(at_rest=resident_bytes() - before, peak=peak, sent={}, seconds=time.monotonic() - begin)


def engine_of(case: Case) -> tuple[LearnerEngine, PackedBatch]:
    """The engine, and a micro-batch."""
    learner = Learner(**case.section())
    settings = EngineSettings(
        learner=learner, device=case.device, max_sequence_tokens=None, routing_replay=False, seed=0,
        lora=LoraSection(**case.lora),
    )  # fmt: skip
    config = AutoConfig.for_model(**case.config())
    # Ranks that share rows have a slice of each.
    length = case.tokens * learner.sequence_parallel // NUM_SEQUENCES
    with unfaked():
        packed = random_row(NUM_SEQUENCES, length, config.vocab_size)
    dtype = DTYPES[learner.dtype]
    return LearnerEngine.from_model(AutoModelForCausalLM.from_config(config, dtype=dtype), settings), packed


def main(path: Path) -> None:
    case = Case(**json.loads(path.read_text(encoding="utf-8")))
    if case.is_real:
        free_at_once()
        # Libraries that the first steps load are not the model's.
        real_peak_of(replace(case, layers=1, tokens=64, config_changes={"hidden_size": 64, "vocab_size": 256}))
    found = real_peak_of(case) if case.is_real else peak_of(case)
    path.with_suffix(".out").write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
