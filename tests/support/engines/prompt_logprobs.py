"""Asks an SGLang server for the log-probs of a prompt: a probe of its weights."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
import numpy as np

from gspo_services.rollout.sglang.http import EngineHttp, decode_answer

ANSWER_S: Final = 60.0


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]
    """(log-prob, token id, text) of each token."""


class _Answer(msgspec.Struct):
    meta_info: _Meta


async def prompt_logprobs(url: str, input_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probs at temperature 1 of input_ids[1:], each given the tokens before it, float32 [T - 1].

    SGLang misreports the highest id of the vocabulary here: keep it out of the probe.
    """
    body = {
        "input_ids": [int(token) for token in input_ids],
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }
    async with aclosing(EngineHttp(url, timeout_s=ANSWER_S, stall_timeout_s=ANSWER_S)) as http:
        answer = decode_answer(await http.post("/generate", body), _Answer)
    logprobs = [logprob for logprob, _, _ in answer.meta_info.input_token_logprobs[1:]]
    assert len(logprobs) == len(input_ids) - 1
    return np.array(logprobs, dtype=np.float32)
