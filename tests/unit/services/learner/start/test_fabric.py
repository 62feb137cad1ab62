"""Machines that train together with TCP between their GPUs are told."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gspo_services.learner.start import Device, warn_without_rdma
from gspo_services.shared.settings import Settings
from tests.support.checking.shapes import QWEN3_30B


def warnings(folder: Path, device: Device = "cuda", model: dict[str, Any] = QWEN3_30B, **learner: Any) -> list[Any]:
    given = {"num_nodes": 2, "zero_stage": 3, "rendezvous_address": "127.0.0.1:29500"} | learner
    with capture_logs() as logs:
        warn_without_rdma(model, Settings.model_validate({"learner": given}), device, folder)
    return logs


def test_several_machines_without_rdma_hear_what_each_pass_gathers(tmp_path: Path) -> None:
    (said,) = warnings(tmp_path / "infiniband")
    assert (said["event"], said["num_nodes"], said["gathered_each_pass"]) == ("no_rdma_between_machines", 2, "57 GiB")
    assert "component rdma" in said["way_out"]
    assert warnings(tmp_path, zero_stage=2)[0]["gathered_each_pass"] == "no weights"
    assert len(warnings(tmp_path, model={"model_type": "unheard of"})) == 1


@pytest.mark.parametrize(("device", "nodes"), [("cpu", 2), ("cuda", 1)])
def test_one_machine_and_cpus_are_not_warned(device: Device, nodes: int, tmp_path: Path) -> None:
    assert warnings(tmp_path, device, num_nodes=nodes) == []


def test_a_machine_with_an_rdma_device_is_not_warned(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    assert warnings(tmp_path) == []
