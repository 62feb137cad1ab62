"""SGLang's answers, as far as the client reads them; other fields are ignored."""

import msgspec


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """/server_info: what a server is and how it was started."""

    version: str
    device: str
    dtype: str
    tp_size: int
    model_path: str
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    disable_radix_cache: bool = False
    max_total_num_tokens: int | None = None
    custom_weight_loader: list[str] = []
    """Also names what this project's plug-in can do beyond SGLang."""


class ModelInfo(msgspec.Struct):
    """/model_info."""

    weight_version: str


class Rank(msgspec.Struct):
    """One rank of /weights_checker."""

    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """/weights_checker with the action "checksum"."""

    ranks: list[Rank] = []
