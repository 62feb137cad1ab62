"""Checkpoints that also take images: their text model is trained, served and exported, and nothing else of them changes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo.model.policy import load_policy
from gspo.model.serving import serving_weights
from gspo.model_files.configuration import read_config
from gspo.model_files.text_model import TOWERS, text_model_of
from gspo_services.learner.export import write_model
from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.server_process import EngineServer, ServerOptions
from gspo_services.rollout.weights.verify import Verifier
from gspo_services.shared.weights import ServedError
from gspo_services.shared.weights.served import require_served
from tests.support.engines.compared import CLOSE, largest_difference
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, checkpoint_tensors
from tests.support.loss.sequences import random_sequence
from tests.support.policy.learner_logprobs import learner_logprobs_of
from tests.support.policy.towers import CHECKPOINTS, save_checkpoint

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]
ALONE = ("qwen3_5", "qwen3_5_moe")
"""Those of which a server has the text model alone."""


def is_served(kind: str) -> bool:
    """Whether SGLang serves it on a CPU."""
    try:
        require_served(text_model_of({"model_type": kind, **CHECKPOINTS[kind]}).config, 1, on_cpu=True)
    except ServedError:
        return False
    return True


def sent_of(folder: Path) -> dict[str, torch.Tensor]:
    """What the learner would publish of it."""
    model = load_policy(folder, torch.float32)
    return {name: tensor.clone() for name, tensor in serving_weights(model, gathered=nullcontext)}


def publish(folder: Path, directory: Path) -> None:
    directory.mkdir()
    save_file(sent_of(folder), directory / "model.safetensors")


def exported(start: Path, trained: Path, directory: Path) -> Path:
    """A checkpoint of the trained text model, in a run that began with ``start``."""
    directory.mkdir()
    write_model(
        directory, sent_of(trained).items(), generation_config=None, dtype=torch.float32, tokenizer_from=start,
        max_shard_bytes=1 << 18,
    )  # fmt: skip
    return directory


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def whole_model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    model, found = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("kind", sorted(TOWERS))
def test_the_text_model_is_that_of_the_whole_and_an_export_is_the_whole_with_it(kind: str, tmp_path: Path) -> None:
    start, trained = tmp_path / "start", tmp_path / "trained"
    save_checkpoint(start, kind, 0)
    whole = save_checkpoint(trained, kind, 1)
    sequences = [random_sequence(length, length, vocab_size=TINY_VOCAB_SIZE) for length in (40, 23)]
    for sequence, own in zip(sequences, learner_logprobs_of(trained, sequences), strict=True):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = whole(input_ids=ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        assert np.abs(own - logprobs.numpy()).max() <= CLOSE
    result = exported(start, trained, tmp_path / "export")
    before, after, now = tensors_of(start), tensors_of(trained), tensors_of(result)
    text = text_model_of({"model_type": kind, **CHECKPOINTS[kind]})
    assert {name for name in before if text.owns(name)} == set(sent_of(trained))
    assert now.keys() == before.keys()
    for name, tensor in now.items():
        assert torch.equal(tensor, (after if text.owns(name) else before)[name]), name
    assert any(not text.owns(name) and not torch.equal(before[name], after[name]) for name in now)
    assert read_config(result) == read_config(start)
    loaded, ids = whole_model(result), torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, whole_model(trained)(input_ids=ids).logits)


@pytest.mark.parametrize("kind", list(filter(is_served, sorted(TOWERS))))
@pytest.mark.parametrize("by_sums", [True, False])
async def test_a_server_of_the_whole_has_each_version_of_the_text_and_keeps_its_towers(
    kind: str, by_sums: bool, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    for seed, name in enumerate(("start", "trained")):
        save_checkpoint(tmp_path / name, kind, seed)
        publish(tmp_path / name, tmp_path / f"version_{seed}")
    result = exported(start, tmp_path / "trained", tmp_path / "export")
    options = ServerOptions(model_path=start, log_path=tmp_path / "server.log", max_total_tokens=4096)
    async with EngineServer(options) as server, Engine(server.url, chunk_tokens=16) as engine:
        verifier = Verifier(engine, directory=tmp_path / "sums" if by_sums else None)
        assert await largest_difference(server, start) <= CLOSE
        expected = await verifier.expect(checkpoint_tensors(tmp_path / "version_0"))
        assert (await verifier.verify(expected)).ok
        expected = await verifier.expect(checkpoint_tensors(tmp_path / "version_1"))
        assert not (await verifier.verify(expected)).ok
        await engine.pause()
        await engine.update_weights_from_disk(tmp_path / "version_1", 1)
        await engine.resume()
        found = await verifier.verify(expected)
        assert found.ok, found
        assert found.unverified == []
        assert await largest_difference(server, result) <= CLOSE
        # A whole checkpoint also changes the towers, which no version of a run does.
        await engine.pause()
        await engine.update_weights_from_disk(tmp_path / "trained", 2)
        await engine.resume()
        found = await verifier.verify(expected)
        assert bool(found.mismatched) == (kind not in ALONE)
        assert all(name.endswith(" (of a tower that is not trained)") for name in found.mismatched)
        assert await largest_difference(server, tmp_path / "trained") <= CLOSE
