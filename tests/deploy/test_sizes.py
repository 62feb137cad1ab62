"""The overlays' run.toml fit their models and GPUs, as `gspo check` estimates it."""

import json
from pathlib import Path

import pytest

from gspo_services.prepare.check.command import main
from tests.deploy.cluster import K8S
from tests.support.checking.shapes import QWEN3_8B, QWEN3_30B

pytestmark = pytest.mark.deploy
OVERLAYS = {"single-gpu-node": (QWEN3_8B, 8), "qwen3-30b-a3b": (QWEN3_30B, 24)}
"""By overlay: its model, and the GPUs of its nodes."""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_check_warns_of_nothing_in_an_overlay(overlay: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, gpus = OVERLAYS[overlay]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = str(K8S / "overlays" / overlay / "run.toml")
    given = ["--model", str(tmp_path), "--gpu", "H100", "--gpus", str(gpus), "--elsewhere", "--no-code", "--json"]
    assert main([config, *given]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [found["text"] for found in findings if found["status"] in ("warn", "fail")] == []
    assert {"KV cache", "lag", "learner memory", "engine memory"} <= {found["check"] for found in findings}
