"""Families in SGLang on a CPU: the learner's log-probs, also after an update, and every parameter compared."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gspo.model.policy import load_policy, prepare_policy
from gspo.model.serving import serving_weights
from gspo.model_files.configuration import read_config
from gspo.moe.mixture import mixture_of
from gspo_services.prepare.check.weights import TRIED
from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.routed import RoutedExperts
from gspo_services.rollout.sglang.server_process import EngineServer, ServerOptions
from gspo_services.rollout.weights.probe import require_same_policy
from gspo_services.rollout.weights.verify import Verification, Verifier
from tests.support.engines.chosen_experts import collected, of_learner, request
from tests.support.engines.compared import CLOSE, largest_difference
from tests.support.learner.tiny_model import checkpoint_tensors
from tests.support.policy.families import KIMI, SERVED, save_family, write_dropped
from tests.support.policy.probed import learners_probe
from tests.support.wire.verified import verify_loaded

pytestmark = [pytest.mark.families, pytest.mark.timeout(900)]


async def require_reported(engine: Engine, folder: Path) -> None:
    """The experts that the engine reports of its tokens are those of the learner's routers."""
    model: Any = load_policy(folder, torch.float32)
    prepare_policy(model, logprob_chunk_tokens=16)
    token_ids, experts, _ = await collected(engine, request(folder.name, 40))
    np.testing.assert_array_equal(np.sort(experts, axis=-1), of_learner(model, token_ids))


async def verified(engine: Engine, folder: Path) -> Verification:
    return await verify_loaded(engine, checkpoint_tensors(folder))


@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss", "qwen3_5_text"])
async def test_what_engines_have_in_float32_is_served_so_by_a_run_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """Biases of routers and of experts, and the decay of linear attention."""
    model = save_family(tmp_path / "model", kind)
    model.to(torch.bfloat16)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.data = 0.05 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "model")
    write_dropped(tmp_path / "model", kind)
    weights = dict(serving_weights(model, gathered=nullcontext, dtype=torch.bfloat16))
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32", "torch.bfloat16"}
    (tmp_path / "sent").mkdir()
    save_file(weights, tmp_path / "sent" / "model.safetensors")
    options = ServerOptions(
        model_path=tmp_path / "model", log_path=tmp_path / "server.log", max_total_tokens=4096, dtype="bfloat16"
    )
    async with EngineServer(options) as server, Engine(server.url, chunk_tokens=16) as engine:
        assert (await verified(engine, tmp_path / "sent")).ok


def test_what_gspo_check_calls_tried_is_tried_here() -> None:
    of_towers = {"gemma3_text", "mistral"}  # tests/families/test_towers.py
    assert {*SERVED, "qwen3"} | of_towers == TRIED


@pytest.mark.parametrize("kind", [*SERVED, KIMI])
async def test_a_server_computes_what_the_learner_does_before_and_after_an_update(kind: str, tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "second")):
        save_family(tmp_path / name, kind, seed)
    options = ServerOptions(
        model_path=tmp_path / "first",
        log_path=tmp_path / "server.log",
        max_total_tokens=4096,
        extra_args=("--enable-return-routed-experts",) if mixture_of(read_config(tmp_path / "first")) else (),
    )
    routed = RoutedExperts.of(read_config(tmp_path / "first")) if options.extra_args else None
    async with EngineServer(options) as server, Engine(server.url, chunk_tokens=16, routed=routed) as engine:
        if routed:
            await require_reported(engine, tmp_path / "first")
        assert await largest_difference(server, tmp_path / "first") <= CLOSE
        await require_same_policy(engine, learners_probe(tmp_path / "first"))
        assert (await verified(engine, tmp_path / "first")).ok
        assert not (await verified(engine, tmp_path / "second")).ok
        verifier = Verifier(engine, directory=tmp_path / "sums")
        assert (await verifier.verify(await verifier.expect(checkpoint_tensors(tmp_path / "first")))) == Verification()
        await engine.pause()
        await engine.update_weights_from_disk(tmp_path / "second", 1)
        await engine.resume()
        found = await verified(engine, tmp_path / "second")
        assert found.ok, found
        assert found.unverified == []
        assert (await verifier.verify(await verifier.expect(checkpoint_tensors(tmp_path / "second")))) == Verification()
        assert await largest_difference(server, tmp_path / "second") <= CLOSE
        if routed:
            await require_reported(engine, tmp_path / "second")
