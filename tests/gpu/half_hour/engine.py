"""A stock SGLang server on the GPU under our client: log-probs, an update amid generation, checksums, a second start.

python -m tests.gpu.half_hour.engine MODEL LOG [ARGUMENT OF SGLANG ...]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gspo.model.packing import TrainSequence, pack
from gspo.model.policy import load_policy, prepare_policy
from gspo_services.rollout.sglang import Engine
from gspo_services.rollout.sglang.generation import GenerateRequest, SamplingParameters
from gspo_services.rollout.sglang.server_process import EngineServer, ServerOptions
from tests.support.learner.tiny_model import checkpoint_tensors
from tests.support.policy.forward import logprobs_of
from tests.support.wire.verified import verify_loaded

NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 256
MIDWAY_S = 0.5
NEW_VERSION = 1
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


async def _generate(engine: Engine, vocab_size: int, seed: int) -> list[TrainSequence]:
    """Sequences of random prompts, all requested at once."""
    prompts = np.random.default_rng(seed).integers(0, vocab_size - 16, (NUM_REQUESTS, PROMPT_TOKENS))

    async def one(number: int) -> TrainSequence:
        sampling = SamplingParameters(max_new_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True, seed=number)
        request = GenerateRequest(rid=f"{seed}-{number}", input_ids=prompts[number].tolist(), sampling=sampling)
        pieces = [piece async for piece in engine.generate(request)]
        token_ids = np.concatenate([prompts[number], *(piece.token_ids for piece in pieces)]).astype(np.int64)
        is_action = np.arange(len(token_ids)) >= PROMPT_TOKENS
        logprobs, versions = np.zeros(len(token_ids), dtype=np.float32), np.full(len(token_ids), -1)
        logprobs[is_action] = np.concatenate([piece.logprobs for piece in pieces])
        runs = [run for piece in pieces for run in piece.version_runs]
        versions[is_action] = np.repeat([run.version for run in runs], [run.num_tokens for run in runs])
        return TrainSequence(
            token_ids=token_ids,
            action_mask=is_action,
            behaviour_logprobs=logprobs,
            versions=versions,
            turn_ids=np.where(is_action, 0, -1).astype(np.int32),
            temperature=1.0,
            advantages=np.zeros(len(token_ids), dtype=np.float32),
        )

    return list(await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS))))


def differences(model_path: Path, sequences: list[TrainSequence]) -> dict[str, Any]:
    """Learner minus engine, per action token and per sequence, on the learner's packed path in bfloat16."""
    model: Any = load_policy(model_path, torch.bfloat16).to(DEVICE)
    prepare_policy(model, logprob_chunk_tokens=1024)
    values, means = [], []
    for sequence in sequences:
        packed = pack([sequence], policy_version=NEW_VERSION).to(DEVICE)
        result = logprobs_of(model, packed)
        difference = (result.logprobs_T - packed.behaviour_T)[packed.mask_T]
        values.append(difference)
        means.append(difference.mean())
    tokens, sequence_means = torch.cat(values), torch.stack(means)
    return {
        "token_std": tokens.std().item(),
        "token_max": tokens.abs().max().item(),
        "token_mean": tokens.mean().item(),
        "sequence_mean_std": sequence_means.std().item(),
    }


def _changed(model_path: Path, directory: Path) -> Path:
    """A copy of the weights with one percent of the elements moved."""
    directory.mkdir(exist_ok=True)
    weights = {}
    for path in model_path.glob("*.safetensors"):
        weights |= load_file(path)
    generator = torch.Generator().manual_seed(1)
    for tensor in weights.values():
        tensor.mul_(1 + 0.02 * (torch.rand(tensor.shape, generator=generator) < 0.01))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for path in model_path.iterdir():
        if "safetensors" not in path.name:
            (directory / path.name).write_bytes(path.read_bytes())
    return directory


async def measure(model_path: Path, log_path: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """All figures of one server. Raises whatever goes wrong."""
    config = json.loads((model_path / "config.json").read_text())
    options = ServerOptions(
        model_path=model_path, log_path=log_path, dtype="bfloat16", extra_args=arguments,
        start_timeout_s=240,
    )  # fmt: skip
    found: dict[str, Any] = {}
    begin = time.monotonic()
    async with EngineServer(options) as server, Engine(server.url, vocab_size=config["vocab_size"]) as engine:
        found["start_s"] = round(time.monotonic() - begin, 1)
        await _generate(engine, config["vocab_size"], 1)
        begin = time.monotonic()
        sequences = await _generate(engine, config["vocab_size"], 2)
        found["tokens_per_s"] = round(NUM_REQUESTS * NEW_TOKENS / (time.monotonic() - begin))
        found["checksums_of_the_start"] = (await verify_loaded(engine, checkpoint_tensors(model_path))).ok
        changed = await asyncio.to_thread(_changed, model_path, Path("/dev/shm/half-hour-weights"))
        async with asyncio.TaskGroup() as tasks:
            under_way = tasks.create_task(_generate(engine, config["vocab_size"], 3))
            await asyncio.sleep(MIDWAY_S)
            begin = time.monotonic()
            await engine.pause("retract")
            await engine.update_weights_from_disk(changed, NEW_VERSION)
            await engine.resume()
            found["update_s"] = round(time.monotonic() - begin, 2)
        spans = [sorted(set(sequence.versions.tolist()) - {-1}) for sequence in under_way.result()]
        found["spans_of_both_versions"] = sum(span == [0, NEW_VERSION] for span in spans)
        found["checksums_after_update"] = (await verify_loaded(engine, checkpoint_tensors(changed))).ok
        found["old_checksums_after_update"] = (await verify_loaded(engine, checkpoint_tensors(model_path))).ok
        second = await _generate(engine, config["vocab_size"], 4)
    found["before_update"] = differences(model_path, sequences)
    found["after_update"] = differences(changed, second)
    found["wrong_version"] = differences(model_path, second)
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(Path(sys.argv[1]), Path(sys.argv[2]), tuple(sys.argv[3:])))))
