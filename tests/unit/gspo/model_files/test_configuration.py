"""What config.json is read as, and what of it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.model.policy import load_policy
from gspo.model_files.configuration import read_config, require_unquantised
from gspo.model_files.file_names import load_config
from tests.support.policy.families import KIMI, save_family


def test_kimi_k2_is_read_as_the_deepseek_v3_that_it_is(tmp_path: Path) -> None:
    """All its experts have the values of the files, and its config.json stays as it is."""
    saved = save_family(tmp_path, KIMI)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == KIMI
    assert read_config(tmp_path)["model_type"] == load_config(tmp_path)[0].model_type == "deepseek_v3"
    loaded = load_policy(tmp_path, torch.float32)
    values = dict(saved.state_dict())
    assert loaded.state_dict().keys() == values.keys()
    assert all(torch.equal(value, values[name]) for name, value in loaded.state_dict().items())


def test_code_of_a_model_of_its_own_is_never_executed(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    own = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobodys", "auto_map": own}))
    with pytest.raises(ValueError, match=r"nobodys is known to code of its own alone \(auto_map\), which is never executed"):
        load_policy(tmp_path, torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        ({"quant_method": "fp8"}, r"\(quantization_config: fp8\), and get no gradient; `gspo model dequantise DIR NEW`"),
        ({"quant_method": "awq"}, "awq.*; take the unquantised model"),
        ("yes", "yes.*; take the unquantised model"),
    ],
)
def test_a_quantised_model_is_refused_with_the_way_out(quantised: Any, words: str, tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "quantization_config": quantised}
    with pytest.raises(ValueError, match=words):
        require_unquantised(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        load_policy(tmp_path, torch.float32)
    require_unquantised({"quantization_config": None})
