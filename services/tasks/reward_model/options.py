"""What a reward model's process is told."""

from __future__ import annotations

from typing import Literal

import msgspec


class RewardModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the settings of the same names, ``reward.model`` and ``reward.model_...``."""

    path: str
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    input: Literal["chat", "text", "pair"] = "chat"
    max_tokens: int = 0
    too_long: Literal["fail", "truncate"] = "fail"
    batch_tokens: int = 16_384
    deadline_s: float = 300.0
    owner: str = ""
    """Whose process it is: all clients of one owner with the same options share one on each machine."""
