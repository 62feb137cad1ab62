"""Requests to the engine and its answers: pieces of output, and the version of every token. Pure.

SGLang reports the exact spans of policy versions only with the last piece of a request; an earlier piece says which version
the server had when the piece left. So a token is tagged early only where no weight update can have touched its request.
Other tokens are held back until the spans arrive.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from gspo_protocol.limits import MAX_CHUNK_TOKENS
from gspo_protocol.messages import VersionRun
from gspo_protocol.messages.base import MAX_LOGPROB

FinishReason = Literal["stop", "length", "abort"]
ABOUT_THE_REQUEST: Final = (400, 413, 422)
"""HTTP statuses that any server would give to this request (bad, too long, unprocessable). All others (500, 503, 404, 429)
are about the server: another one may well serve the request."""
MAX_SEED: Final = 2**63 - 1
MAX_VERSION: Final = 2**53
MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling of tokens. Log-probs are taken at ``temperature``, before top_p and top_k cut the distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy decoding, whose log-probs are at temperature 1: for evaluation, never for training."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Continue up to max_new_tokens; SGLang then ignores stop_token_ids as well."""
    seed: int | None = None
    """A server in deterministic mode draws the same samples for the same seed, tokens and weights; others ignore it."""
    adapter: str = ""
    """Which of the run's adapters; empty: it has one, or none."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}, must be finite and not negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, must be in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, must be at least 1, or -1 for all tokens")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}, must be in [0, 2^63)")


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to sample: token ids in, token ids out."""

    rid: str
    """Names the request; unique among the requests under way, without '#' and ';'."""
    input_ids: Sequence[int] | np.ndarray[Any, Any]
    """All tokens so far, int [T], T >= 1."""
    sampling: SamplingParameters

    def __post_init__(self) -> None:
        if not self.rid or "#" in self.rid or ";" in self.rid:
            raise ValueError(f"rid is {self.rid!r}, must not be empty and not contain '#' or ';'")
        if len(self.input_ids) == 0:
            raise ValueError(f"request {self.rid}: input_ids is empty, SGLang needs at least one token")


class OutputPiece(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, in order, each exactly once."""

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    """int32 [n]; n may be 0 in the last piece."""
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    """float32 [n], of the token that was sampled, at the sampling temperature."""
    version_runs: list[VersionRun]
    """The policy version that made each token; the runs add up to n."""
    experts: np.ndarray[Any, Any] | None = None
    """The experts that predicted each token, uint8 [n, ...] (``gspo_protocol.messages.experts``); None: not asked for."""
    finish_reason: FinishReason | None = None
    """None: more pieces follow. "stop" ends with the stop token itself, which was sampled and is in ``token_ids``."""

    def first(self, num_tokens: int) -> "OutputPiece":
        """Return the first ``num_tokens`` tokens, or all if there are fewer."""
        if num_tokens >= len(self.token_ids):
            return self
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            version_runs=first_runs(self.version_runs, num_tokens),
            experts=None if self.experts is None else self.experts[:num_tokens],
        )


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens as the server sent them; ``spans`` (version, start, end over all output tokens) only when finished."""

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    server_version: int
    finish_reason: FinishReason | None
    spans: list[tuple[int, int, int]] | None
    experts: str | None = None
    """As SGLang encodes those of all output tokens, in the last output."""


class _Finish(msgspec.Struct):
    type: FinishReason
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNK_TOKENS)]
    weight_version: str
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, TokenId, Any]] = []
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 400


class _Event(msgspec.Struct):
    output_ids: list[TokenId] = []
    meta_info: _Meta | None = None
    error: _Error | str | None = None


class OutputDecoder:
    """Turns the payloads of one request's answer into ``Output`` objects that hold each token once.

    ``incremental`` says whether the server sends new tokens only (--incremental-streaming-output) or all of them again
    with every event. ``completion_tokens`` always counts all, so it decides what is new. This also handles the abort of a
    queued request, where SGLang repeats the last token.
    """

    def __init__(self, *, incremental: bool) -> None:
        self._incremental = incremental
        self._num_tokens = 0
        self._decoder = msgspec.json.Decoder(_Event)

    def decode(self, payload: bytes) -> Output:
        """Decode one payload.

        Raises: ValueError that says what is wrong with the payload or the server; RequestRefused, its subclass, when the
        server refused this request.
        """
        try:
            event = self._decoder.decode(payload)
        except RecursionError as error:
            raise ValueError("the payload is nested too deeply") from error
        if event.error is not None or event.meta_info is None:
            code = event.error.code if isinstance(event.error, _Error) else ABOUT_THE_REQUEST[0]
            raise _failure(code, f"the server answered {payload[:500].decode(errors='replace')}")
        meta = event.meta_info
        finish = meta.finish_reason
        if finish is not None and finish.status_code is not None:
            raise _failure(finish.status_code, f"the server aborted the request: {finish.status_code} {finish.message}")
        num_new = meta.completion_tokens - self._num_tokens
        if num_new < 0:
            raise ValueError(f"completion_tokens fell from {self._num_tokens} to {meta.completion_tokens}")
        start = 0 if self._incremental else self._num_tokens
        token_ids = event.output_ids[start : start + num_new]
        entries = meta.output_token_logprobs[start : start + num_new]
        if len(token_ids) != num_new or len(entries) != num_new:
            raise ValueError(f"{num_new} new tokens announced, {len(token_ids)} ids and {len(entries)} log-probs sent")
        if [entry[1] for entry in entries] != token_ids:
            raise ValueError(f"log-probs belong to tokens {[entry[1] for entry in entries]}, but the output is {token_ids}")
        # The same checks as the broker's: a log-prob that it would refuse ends this request, not the process.
        logprobs = np.array([entry[0] for entry in entries], dtype=np.float64)
        possible = (logprobs >= -MAX_FLOAT32) & (logprobs <= MAX_LOGPROB)
        if not possible.all():
            place = int(possible.argmin())
            raise ValueError(f"token {self._num_tokens + place} has log-prob {logprobs[place]}: expected a log-prob (<= 0)")
        self._num_tokens = meta.completion_tokens
        spans = None
        if finish is not None:
            spans = _spans(meta, self._num_tokens)
        return Output(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=logprobs.astype(np.float32),
            server_version=parse_version(meta.weight_version),
            finish_reason=None if finish is None else finish.type,
            spans=spans,
            experts=meta.routed_experts,
        )


class RequestRefused(ValueError):
    """The server answered with an error instead of tokens, and the error is about this request."""


def is_about_the_request(status: int) -> bool:
    """Return whether an HTTP status says that no server can serve the request."""
    return status in ABOUT_THE_REQUEST


def _failure(status: int, text: str) -> ValueError:
    return RequestRefused(text) if is_about_the_request(status) else ValueError(text)


class VersionTagger:
    """Turns the ``Output`` objects of one HTTP request into ``OutputPiece`` objects with exact versions.

    push(output, certain=True) promises that no weight update came between the start of the request and the arrival of the
    output, so that the server's version made all of its tokens. Without this promise tokens are held back, and so are
    fewer than ``piece_tokens``: SGLang sends the first token of every request alone.
    """

    def __init__(self, piece_tokens: int = 1) -> None:
        self._piece_tokens = piece_tokens
        self._held: list[Output] = []
        self.num_held = 0
        """Tokens that were received and not given out yet."""
        self.num_given = 0
        self.last_given: int | None = None
        """The last token that was given out."""
        self._first_version: int | None = None

    def push(self, output: Output, *, certain: bool) -> OutputPiece | None:
        """Take an output; return the tokens whose version is known now, or None. The last output always gives a piece."""
        if self._first_version is None:
            self._first_version = output.server_version
        self._held.append(output)
        self.num_held += len(output.token_ids)
        if output.spans is not None:
            return self._give(version_runs(output.spans, self.num_given), output.finish_reason)
        # Another client may have updated the server: then a changed version shows it.
        enough = self.num_held >= self._piece_tokens
        if enough and certain and output.server_version == self._first_version:
            return self._give([VersionRun(output.server_version, self.num_held)], None)
        return None

    def _give(self, runs: list[VersionRun], finish_reason: FinishReason | None) -> OutputPiece:
        piece = OutputPiece(
            token_ids=np.concatenate([output.token_ids for output in self._held]),
            logprobs=np.concatenate([output.logprobs for output in self._held]),
            version_runs=runs,
            finish_reason=finish_reason,
        )
        self.num_given += self.num_held
        if self.num_held:
            self.last_given = int(piece.token_ids[-1])
        self._held, self.num_held = [], 0
        return piece


def version_runs(spans: Sequence[tuple[int, int, int]], skip: int) -> list[VersionRun]:
    """Return the runs of the output tokens from index ``skip``; spans are (version, start, end), in order, gapless."""
    runs: list[VersionRun] = []
    for version, start, end in spans:
        num_tokens = end - max(start, skip)
        if num_tokens <= 0:
            continue
        if runs and runs[-1].version == version:
            runs[-1] = VersionRun(version, runs[-1].num_tokens + num_tokens)
        else:
            runs.append(VersionRun(version, num_tokens))
    return runs


def first_runs(runs: Sequence[VersionRun], num_tokens: int) -> list[VersionRun]:
    """Return the runs of the first ``num_tokens`` tokens."""
    found: list[VersionRun] = []
    for run in runs:
        if num_tokens <= 0:
            break
        found.append(VersionRun(run.version, min(run.num_tokens, num_tokens)))
        num_tokens -= run.num_tokens
    return found


NEUTRAL: Final = {
    "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None,
    "min_new_tokens": 0, "stop": None, "stop_regex": None, "stop_token_ids": None, "n": 1, "beam_width": None,
    "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "sampling_seed": None, "custom_params": None,
    "watermark": None,
}  # fmt: skip
"""What shapes an answer besides what a run sets: stated in each request, because a server may have defaults of its own."""


def generate_fields(
    server_rid: str,
    input_ids: list[int],
    sampling: SamplingParameters,
    stream: bool,
    chunk_tokens: int,
    adapter: str | None = None,
    with_experts: bool = False,
) -> dict[str, Any]:
    """The fields of /generate. ``adapter``: the name under which the server has it; None: the model alone."""
    parameters: dict[str, Any] = {
        **NEUTRAL,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos,
        "stream_interval": chunk_tokens,
    }
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "rid": server_rid,
        "input_ids": input_ids,
        "stream": stream,
        "return_logprob": True,
        "sampling_params": parameters,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    if with_experts:
        # From the position on that predicts the first token: one row for each.
        body |= {"return_routed_experts": True, "routed_experts_start_len": len(input_ids) - 1}
    return body


def joint_body(fields: Sequence[dict[str, Any]]) -> bytes:
    """The body of one /generate for several answers, of which none is streamed and none has an adapter."""
    each = {name: [of_one[name] for of_one in fields] for name in ("rid", "input_ids", "sampling_params")}
    return msgspec.json.encode({"stream": False, "return_logprob": True, **each})


def true_reason(
    reason: FinishReason | None, num_given: int, last_given: int | None, sampling: SamplingParameters
) -> FinishReason | None:
    """Return the true reason of an abort, which can hide a stop token or the length limit of the same step.

    Asking for the rest after such an end would continue behind the stop token.
    """
    if reason == "abort" and num_given:
        if last_given in sampling.stop_token_ids:
            return "stop"
        if num_given >= sampling.max_new_tokens:
            return "length"
    return reason


def parse_version(text: str) -> int:
    """Parse the server's weight version. Raises: ValueError when the server was started without a number as
    --weight-version.
    """
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"the server's weight version is {text!r}, not a number: start it with --weight-version, "
            f"or load a version before the first request"
        )
    if len(text) > len(str(MAX_VERSION)) or int(text) > MAX_VERSION:
        raise ValueError(f"the server's weight version is {text[:32]}, the largest possible is {MAX_VERSION}")
    return int(text)


def _spans(meta: _Meta, num_tokens: int) -> list[tuple[int, int, int]]:
    if meta.weight_versions is None:
        return [(parse_version(meta.weight_version), 0, num_tokens)] if num_tokens else []
    spans = [(parse_version(span.version), span.start, span.end) for span in meta.weight_versions]
    expected = 0
    for _, start, end in spans:
        if start != expected or end < start:
            raise ValueError(f"version spans have a gap: {spans}")
        expected = end
    if expected != num_tokens:
        raise ValueError(f"version spans {spans} end at {expected}, the output has {num_tokens} tokens")
    return spans
