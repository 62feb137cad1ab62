"""The server of an evaluation serves what a run's own rollouts would serve."""

import json
from pathlib import Path

import pytest

from gspo_services.runs.eval.sglang_server import open_served
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import load_settings


async def test_a_model_that_sglang_computes_otherwise_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "sliding_window": 16, "layer_types": ["sliding_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = load_settings(None, [f"run.directory={tmp_path / 'run'}"])
    with pytest.raises(ConfigurationError, match="with a window of 16 tokens"):
        async with open_served(settings, tmp_path, "window", 100):
            raise AssertionError
    assert not (tmp_path / "run").exists()
