"""The learner's steps on a device that is not the host: where they wait for it, and that they mix the two nowhere.

The device is claimed: see tests/support/learner/claimed_device.py. The options are in tests/ranks/test_device_options.py.
"""

import pytest

from tests.support.learner.waits import WORKER, Case, Counts, Waits, counted, planted_at

PER_STEP, PER_BATCH = 2, 3
"""Per step: loss and soundness of the gradients, their norm. Per batch: mismatch, statistics, load of the experts."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Counts]]]:
    cases = [Case("one", layers=1, plants=("item", "host", "cpu", "mask"), publishes=True), Case("two", layers=2)]
    return counted(tmp_path_factory.mktemp("waits"), cases, 300)


def test_no_layer_and_no_micro_batch_waits_for_the_device(found: dict[str, dict[str, dict[str, Counts]]]) -> None:
    waits = Waits.of(found["two"]["default"])
    assert waits.per_micro_batch == {}
    assert found["two"]["default"] == found["one"]["default"]
    assert (sum(waits.per_step.values()), sum(waits.per_batch.values())) == (PER_STEP, PER_BATCH), waits


def test_no_operation_has_tensors_of_host_and_device(found: dict[str, dict[str, dict[str, Counts]]]) -> None:
    assert [Waits.of(case["default"]).mixes for case in found.values()] == [{}, {}]
    assert [line for case in found.values() for line in case["start"]["made"] if line.startswith("mixes")] == []


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        ("item", "waits: _local_scalar_dense"),
        ("host", "mixes: mul with the host's [64]"),
        ("cpu", "waits: cpu"),
        ("mask", "waits: index by a mask"),
    ],
)
def test_a_fault_planted_in_a_layer_is_found_with_its_line(
    found: dict[str, dict[str, dict[str, Counts]]], plant: str, kind: str
) -> None:
    # In each micro-batch.
    assert found["one"]["plants"][plant][f"{kind} at {planted_at(WORKER, plant)}"] == 4


def test_a_publication_waits_for_the_device_once(found: dict[str, dict[str, dict[str, Counts]]]) -> None:
    (line,) = found["one"]["publications"][""].items()
    assert line[0].startswith("waits: synchronize at ")
    assert line[1] == 1


@pytest.mark.parametrize(("plant", "kind"), [("copied", "waits: cpu"), ("looked at", "waits: _local_scalar_dense")])
def test_a_fault_planted_in_what_is_served_is_found_for_each_parameter(
    found: dict[str, dict[str, dict[str, Counts]]], plant: str, kind: str
) -> None:
    assert found["one"]["publications"][plant][f"{kind} at {planted_at(WORKER, plant)}"] > 10
