"""Log-probs of given tokens, as a server computes them."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gspo_services.rollout.sglang.http import EngineError, EngineHttp, decode_answer

SCORING_S: Final = 120.0


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]


class _Answer(msgspec.Struct):
    meta_info: _Meta


def scoring_fields(token_ids: Sequence[int], first: int = 1, adapter: str = "") -> dict[str, Any]:
    """Return the request for log-probs of ``token_ids[first:]``; the answer has one entry more, which has none."""
    fields: dict[str, Any] = {
        "input_ids": list(token_ids),
        "return_logprob": True,
        "logprob_start_len": first - 1,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }
    return fields | ({"lora_path": adapter} if adapter else {})


async def prompt_logprobs(http: EngineHttp, token_ids: Sequence[int], first: int = 1, adapter: str = "") -> list[float]:
    """Return log-probs of ``token_ids[first:]``, each given all tokens before it, at temperature 1. Raises: EngineError.

    ``adapter``: the name under which the server has it; empty: the model alone. SGLang takes memory for each of these tokens
    and its whole vocabulary, and misreports the highest id of the vocabulary here.
    """
    body = scoring_fields(token_ids, first, adapter)
    found = decode_answer(await http.post("/generate", body, timeout_s=SCORING_S), _Answer)
    # The token at ``logprob_start_len`` has none.
    logprobs = [logprob for logprob, _, _ in found.meta_info.input_token_logprobs[1:]]
    if len(logprobs) != len(token_ids) - first or None in logprobs:
        raise EngineError(
            f"log-probs of {len(token_ids) - first} tokens were asked for, the server answered {str(logprobs)[:300]}"
        )
    return [float(logprob) for logprob in logprobs if logprob is not None]
