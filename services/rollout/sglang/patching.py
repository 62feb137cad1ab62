"""How SGLang is asked to patch or sum its parameters, and what its ranks answer (gspo_services.shared.sglang_patching)."""

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gspo_protocol.tiles import Sums
from gspo_services.rollout.sglang.http import EngineError
from gspo_services.shared.weights import answer_file, sums_file


@dataclass(frozen=True, kw_only=True)
class RankSums:
    """One rank's parameters."""

    sizes: dict[str, int]
    """The bytes of each, by SGLang's names."""
    sums: Sums
    """Of the tiles of what it was asked for, in that order."""
    others: dict[str, str] = field(default_factory=dict)
    """The digests of parameters that it was not asked for."""


def tensor_payload(data: bytes) -> str:
    """Return [("patch", ByteTensor of ``data``)], as SGLang reads named tensors: a pickle in base64, made without torch."""
    numbers = b"".join(b"K" + bytes([each]) for each in data)
    tensor = b"ctorch\nByteTensor\n" + b"](" + numbers + b"e" + b"\x85R"
    return base64.b64encode(b"\x80\x02](X\x05\x00\x00\x00patch" + tensor + b"\x86e.").decode()


def require_answers(directory: Path, num_ranks: int, undone: str) -> list[dict[str, Any]]:
    """Return what each rank has answered. ``undone``: what the error calls a request that failed.

    Raises: EngineError when a rank has failed, or has not answered.
    """
    answers: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        try:
            answer = msgspec.json.decode((directory / answer_file(rank)).read_bytes(), type=dict[str, Any])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise EngineError(f"the parameters of rank {rank} were {undone}: it has not answered ({error})") from error
        if "error" in answer:
            raise EngineError(f"the parameters of rank {rank} were {undone}: {answer['error']}")
        answers.append(answer)
    return answers


def read_sums(directory: Path, num_ranks: int) -> list[RankSums]:
    """Return what each rank has reported (gspo_services.shared.sglang_sums). Raises: EngineError."""
    found: list[RankSums] = []
    for rank, answer in enumerate(require_answers(directory, num_ranks, "not summed")):
        try:
            sizes = msgspec.convert(answer.get("sizes"), dict[str, int])
            others = msgspec.convert(answer.get("others"), dict[str, str])
            sums = np.frombuffer((directory / sums_file(rank)).read_bytes(), dtype="<u8")
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise EngineError(f"the sums of the parameters of rank {rank} cannot be read: {error}") from error
        found.append(RankSums(sizes=sizes, sums=sums, others=others))
    return found
