"""SGLang's answers, as far as the client reads them; fields that are not named here are passed over."""

from typing import Any

import msgspec


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is and how it was started; more than this is in its /server_info."""

    version: str
    device: str
    dtype: str
    tp_size: int
    model_path: str
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    disable_radix_cache: bool = False
    max_total_num_tokens: int | None = None


class ModelInfo(msgspec.Struct):
    """/model_info."""

    weight_version: str


class Rank(msgspec.Struct):
    """One rank of /weights_checker."""

    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """/weights_checker with action checksum."""

    ranks: list[Rank] = []


class PromptMeta(msgspec.Struct):
    """meta_info of a /generate that only reads a prompt: (log-prob, token id, text) per token."""

    input_token_logprobs: list[tuple[float | None, int, Any]]


class PromptAnswer(msgspec.Struct):
    """/generate that only reads a prompt."""

    meta_info: PromptMeta
