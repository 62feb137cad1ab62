"""Real servers beside the learner's probe: one that differs is named before it generates, a healthy pair is not.

Healthy pairs of families, and of servers of two ranks: ``test_served.py``, ``tests/ranks/test_server_ranks.py``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.server_process import EngineServer, ServerOptions
from gspo_services.rollout.weights.probe import require_same_policy
from gspo_services.shared.runtime.errors import ConfigurationError
from tests.support.learner.tiny_model import save_tiny_dense
from tests.support.policy.families import save_family
from tests.support.policy.probed import learners_probe

pytestmark = [pytest.mark.families, pytest.mark.timeout(1800)]

Change = Callable[[Path], None]


def configured(*path: str, value: Any) -> Change:
    """Writes another value into config.json."""

    def write(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        place = config
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        (directory / "config.json").write_text(json.dumps(config))

    return write


def linear_positions(directory: Path) -> None:
    configured("rope_parameters", value={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})(directory)


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Change:
    def write(directory: Path) -> None:
        found = load_file(directory / "model.safetensors")
        change(found)
        save_file(found, directory / "model.safetensors", {"format": "pt"})

    return write


def another_layer(found: dict[str, torch.Tensor]) -> None:
    found["model.layers.1.self_attn.o_proj.weight"] *= 1.05


def without_padding(directory: Path) -> None:
    """The engine has more rows, which its softmax counts."""
    configured("vocab_size", value=436)(directory)

    def cut(found: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            found[name] = found[name][:436].clone()

    tensors(cut)(directory)


def with_more_tokens(directory: Path) -> None:
    configured("vocab_size", value=564)(directory)

    def pad(found: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            found[name] = torch.cat([found[name], torch.zeros(64, found[name].shape[1])])

    tensors(pad)(directory)


def another_revision(directory: Path) -> None:
    save_tiny_dense(directory, "qwen3", 2, seed=7)


OF_QWEN3: dict[str, tuple[Change, str]] = {
    "theta": (
        configured("rope_parameters", "rope_theta", value=1e6),
        "rope_theta is 10000.0 in the engine, 1",
    ),
    "scaling": (linear_positions, "rope_parameters.factor is missing in the engine, 4.0 in the learner"),
    "epsilon": (configured("rms_norm_eps", value=1e-3), "rms_norm_eps is 1e-06 in the engine, 0.001 in the learner"),
    "a layer": (tensors(another_layer), "from token .* It is there from the first token on: .*a weight"),
    "padding": (without_padding, "vocab_size is 500 in the engine, 436 in the learner"),
    "more tokens": (with_more_tokens, "it has 500 tokens, the learner's model 564"),
    "a revision": (another_revision, "from token 1 of 400 on"),
}
WINDOW = {"window": (configured("sliding_window", value=128), "sliding_window is 16 in the engine, 128 in the learner")}


async def said_of(engine: Engine, directory: Path) -> dict[str, str]:
    """What is said with the learner's config.json, and without."""
    probe, said = learners_probe(directory), {}
    for name, given in (("with", probe), ("without", msgspec.structs.replace(probe, config=""))):
        with pytest.raises(ConfigurationError, match="is not the learner's policy, and nothing was sampled") as caught:
            await require_same_policy(engine, given)
        said[name] = str(caught.value)
    return said


@pytest.mark.parametrize(("kind", "changes"), [("qwen3", OF_QWEN3), ("gpt_oss", WINDOW)])
async def test_a_server_that_computes_another_policy_is_named_before_it_generates(
    kind: str, changes: dict[str, tuple[Change, str]], tmp_path: Path
) -> None:
    """The learner's files are changed, and one server stays as it is: a pair differs either way."""
    served = tmp_path / "served"
    if kind == "qwen3":
        save_tiny_dense(served, "qwen3", 2)
    else:
        save_family(served, kind)
    options = ServerOptions(model_path=served, log_path=tmp_path / "server.log", max_total_tokens=4096)
    async with EngineServer(options) as server, Engine(server.url, chunk_tokens=16) as engine:
        await require_same_policy(engine, learners_probe(served))
        for name, (change, expected) in changes.items():
            own = tmp_path / name
            shutil.copytree(served, own)
            change(own)
            said = await said_of(engine, own)
            print(name, said)
            assert re.search(expected, said["with"]), (name, said)
        if kind == "gpt_oss":
            assert "Before it they agree" in said["without"] or "grows with the position" in said["without"]


async def test_a_pair_in_bfloat16_is_not_accused(tmp_path: Path) -> None:
    save_family(tmp_path / "model", "qwen3_moe")
    options = ServerOptions(
        model_path=tmp_path / "model", log_path=tmp_path / "server.log", max_total_tokens=4096, dtype="bfloat16"
    )
    async with EngineServer(options) as server, Engine(server.url, chunk_tokens=16) as engine:
        for dtype in ("bfloat16", "float32"):
            await require_same_policy(engine, learners_probe(tmp_path / "model", dtype))
        save_family(tmp_path / "other", "qwen3_moe", seed=3)
        with pytest.raises(ConfigurationError, match="from token"):
            await require_same_policy(engine, learners_probe(tmp_path / "other", "bfloat16"))
