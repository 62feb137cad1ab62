"""Bytes moved and operations done by a learner's step, by place in the model, beside the least that they need.

    python -m benchmarks.step_bytes --model Qwen3-30B-A3B --layers 2 --tokens 16384 --device H100

The step is the real one, DeepSpeed's optimizer included, on fake tensors with the branches of a GPU (tests/support/paper).
Only some layers are made: what is said of a layer holds for each. A place's least is its weights read twice and their
gradient written once, its inputs and outputs once each way, and Adam's 30 bytes a parameter; recomputed activations are not
in it. The time at the device's published rates is a bound from below: kernels are eager ones, and nothing overlaps.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from gspo_services.shared.estimates import device_named, known_devices
from gspo_services.shared.estimates.roofline import ADAM_BYTES
from gspo_services.shared.settings import Learner
from tests.support.paper.counted import Amount, Counted, place_of
from tests.support.paper.fake_ranks import fake_ranks
from tests.support.paper.held import Held
from tests.support.paper.peak_worker import Case, engine_of, policy_gradient
from tests.support.paper.shapes import MODELS

BF16: Final = 2
PASSED: Final = {"head": 1, "embedding": 1, "router": 1, "experts": 2, "attention": 2, "norms": 2}
"""Hidden states of a token that a place reads and writes in one pass."""


def counted_step(case: Case) -> tuple[Counted, dict[str, int], int]:
    """What the second step did, the parameters of each place, and the model's width."""
    with fake_ranks(case.num_ranks), Held():
        engine, packed = engine_of(case)
        engine._coverage_known = True  # no value says whether there was a gradient
        engine.train_mini_batch([packed], policy_gradient)
        counted, phase_of = Counted(), engine.profile.phase

        @contextmanager
        def phase(name: Any) -> Iterator[None]:
            with phase_of(name), counted.phase(name):
                yield

        with mock.patch.object(engine.profile, "phase", phase), counted:
            engine.train_mini_batch([packed], policy_gradient)
        parameters: dict[str, int] = defaultdict(int)
        for name, parameter in engine._engine.module.named_parameters():
            parameters[place_of([name])] += getattr(parameter, "ds_numel", parameter.numel())
        return counted, parameters, int(engine._engine.module.config.hidden_size)


def least_bytes(place: str, parameters: dict[str, int], tokens: int, hidden: int, num_norms: int) -> float:
    """Of forward and backward of a place, or of the optimizer."""
    if place == "optimizer":
        return float(ADAM_BYTES * sum(parameters.values()))
    times = num_norms if place == "norms" else 1
    # Backward reads the inputs and the gradients of the outputs, and writes those of the inputs.
    passed = PASSED.get(place, 0) * times * tokens * hidden * BF16 * 2.5
    return 3 * BF16 * parameters.get(place, 0) + passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=2, help="how many are made (default: 2)")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the one micro-batch (default: 16384)")
    parser.add_argument("--device", choices=known_devices(), default="H100", help="whose rates are taken (default: H100)")
    asked = parser.parse_args()
    device = device_named(asked.device)
    assert device is not None
    assert device.bandwidth is not None
    assert device.peak is not None
    own = {"logprob_chunk_tokens": Learner().logprob_chunk_tokens}
    case = Case(model=asked.model, layers=asked.layers, tokens=asked.tokens, micro_batches=1, learner=own)
    counted, parameters, hidden = counted_step(case)
    print(
        f"{asked.model}, {asked.layers} layers, one step of {asked.tokens:,} tokens in bfloat16, recomputed; {device.name}"
    )
    print(f"{'place':14}{'GB':>9}{'least':>9}{'times':>8}{'TFLOP':>9}{'kernels':>9}{'ms':>9}")
    total, bound = 0.0, 0.0
    for place in (*PASSED, "loss and sums", "optimizer"):
        amount = Amount.sum(each for (name, _), each in counted.amounts.items() if name == place)
        least = least_bytes(place, parameters, asked.tokens, hidden, 2 * asked.layers + 1)
        seconds = max(amount.moved / device.bandwidth, amount.operations / device.peak)
        # A quarter of the operations is done again, from the checkpoints.
        total, bound = total + seconds, bound + max(least / device.bandwidth, amount.operations * 0.75 / device.peak)
        times = f"{amount.moved / least:8.1f}" if least else f"{'':8}"
        print(
            f"{place:14}{amount.moved / 1e9:9.1f}{least / 1e9:9.1f}{times}{amount.operations / 1e12:9.2f}"
            f"{amount.kernels:9}{1000 * seconds:9.1f}"
        )
    print(f"at published rates {1000 * total:.0f} ms, {total / bound:.1f} times a roofline of {1000 * bound:.0f} ms")


if __name__ == "__main__":
    main()
