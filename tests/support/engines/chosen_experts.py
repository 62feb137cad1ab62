"""The experts of an answer: those that a real engine reports, and those that the learner chooses for the same tokens."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.model.packing import TrainSequence, pack
from gspo.moe.experts import ExpertRecorder
from gspo_protocol.messages.experts import decode_experts
from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.generation import GenerateRequest, OutputPiece, SamplingParameters
from tests.support.policy.forward import logprobs_of

PROMPT = [10, 20, 30, 40]


def request(rid: str, num_tokens: int, seed: int = 5) -> GenerateRequest:
    sampling = SamplingParameters(max_new_tokens=num_tokens, ignore_eos=True, seed=seed)
    return GenerateRequest(rid=rid, input_ids=PROMPT, sampling=sampling)


async def collected(engine: Engine, asked: GenerateRequest) -> tuple[list[int], NDArray[np.int16], NDArray[Any]]:
    """Token ids, experts and versions of an answer."""
    pieces: list[OutputPiece] = [piece async for piece in engine.generate(asked)]
    versions = [run.version for piece in pieces for run in piece.version_runs for _ in range(run.num_tokens)]
    experts = np.concatenate([decode_experts(piece.experts) for piece in pieces if piece.experts is not None])
    return [token for piece in pieces for token in piece.token_ids.tolist()], experts, np.array(versions)


def of_learner(model: Any, token_ids: list[int]) -> NDArray[np.int16]:
    """The experts with which the learner predicts each token of an answer to PROMPT, [n, layers, k], in order of number."""
    mask = np.arange(len(PROMPT) + len(token_ids)) >= len(PROMPT)
    sequence = TrainSequence(
        token_ids=np.array(PROMPT + token_ids), action_mask=mask, behaviour_logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1), turn_ids=np.where(mask, 0, -1).astype(np.int32), temperature=1.0,
        advantages=np.zeros(len(mask), np.float32),
    )  # fmt: skip
    packed = pack([sequence], policy_version=0)
    recorder = ExpertRecorder(model)
    with recorder.recording():
        logprobs_of(model, packed)
    picks = recorder.take()
    assert picks is not None
    return np.sort(picks.indices_LTK.transpose(0, 1)[packed.mask_T].numpy().astype(np.int16), axis=-1)
