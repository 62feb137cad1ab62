"""Targets for SGLang's answers, a model's text, and the files that carry weights to SGLang."""

import asyncio
import json
import re
from functools import cache
from random import Random
from typing import Any, Final

import msgpack
import msgspec
import numpy as np
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from safetensors import deserialize

from gspo_protocol.codec import decode, encode
from gspo_protocol.messages import Segment, TensorInfo
from gspo_services.rollout.sglang.generation import OutputDecoder, OutputPiece, VersionTagger
from gspo_services.rollout.sglang.http import EngineError, decode_answer, events
from gspo_services.rollout.sglang.server_info import Checksums, ModelInfo, ServerInfo
from gspo_services.tasks.environments.arithmetic import Arithmetic, ArithmeticOptions
from gspo_services.tasks.environments.calculator import Calculator, CalculatorOptions
from gspo_services.tasks.environments.expression import MAX_RESULT, evaluate
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_json_lines, mutate_lines
from tests.fuzz.scratch import scratch
from tests.fuzz.target import Target, require
from tests.support.builders import a_chunk
from tests.support.wire.engine_files import write_safetensors

SMALL_EVENT: Final = 64
ANSWERS: Final[tuple[type[Any], ...]] = (ServerInfo, ModelInfo, Checksums)
SAFETENSORS_NAMES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class _NoConnection(BaseProtocol):
    """What a reader asks to pause and resume, here without a socket."""

    def pause_reading(self) -> None:
        pass

    def resume_reading(self, resume_parser: bool = True) -> None:
        pass


@cache
def _no_connection() -> _NoConnection:
    return _NoConnection(asyncio.new_event_loop())


def _events(pieces: list[bytes], limit: int) -> list[bytes] | None:
    """The events of a whole stream that came in these pieces; None: an event is over the limit."""

    async def read() -> list[bytes]:
        return [event async for event in events(reader)]

    reader = StreamReader(_no_connection(), limit // 2, loop=_no_connection()._loop)
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    reading = read()
    try:
        # All data is there, so this coroutine never waits.
        reading.send(None)
    except StopIteration as done:
        found: list[bytes] = done.value
        return found
    except EngineError:
        return None
    raise AssertionError("the reader waits for data after the end of the stream")


def _expected_events(data: bytes, limit: int) -> list[bytes] | None:
    lines = [line for line in re.findall(rb"[^\n]*\n?", data) if line]
    if any(len(line) > limit for line in lines):
        return None
    return [line[5:].strip() for line in lines if line.startswith(b"data:") and line.endswith(b"\n")]


def stream(data: bytes) -> None:
    """Server-sent events: the whole ``data:`` lines and the same limit however the network splits the stream."""
    cut = data[0] % 17 + 1 if data else 1
    whole = [data]
    pieces = [data[at : at + cut] for at in range(0, len(data), cut)]
    single = [data[at : at + 1] for at in range(len(data))] if len(data) <= 128 else whole
    for limit in (SMALL_EVENT, 1 << 20):
        expected = _expected_events(data, limit)
        for each in (whole, pieces, single):
            found = _events(each, limit)
            require(found == expected, f"{found} was read, {expected} was sent")


@cache
def stream_seeds() -> list[bytes]:
    return [
        b'data: {"a": 1}\n\ndata: [DONE]\n\n',
        b": comment\r\ndata: x\r\ndata:y\r\n\r\nevent: z\n\n",
        b"data: " + b"x" * 58 + b"\n\ndata: " + b"y" * 59 + b"\n\n",
        b"\r\n\r\n\n\n\r\rdata: 1\r\n\n",
    ]


def output(data: bytes) -> None:
    """Payloads of /generate, one a line: pieces that a chunk can carry, or ValueError."""
    payloads = data.split(b"\n")
    decoder = OutputDecoder(incremental=payloads[0].startswith(b"+"))
    tagger = VersionTagger(2)
    for number, payload in enumerate(payloads[1:]):
        try:
            decoded = decoder.decode(payload)
        except ValueError:
            return
        piece = tagger.push(decoded, certain=number % 2 == 0)
        if piece is not None and len(piece.token_ids):
            _require_carried(piece)
        if decoded.finish_reason is not None:
            require(tagger.num_held == 0, "the tagger still has tokens at the end")
            return


def _require_carried(piece: OutputPiece) -> None:
    """A piece passes every check of the wire and comes back unchanged."""
    num_tokens = len(piece.token_ids)
    chunk = a_chunk(
        num_tokens=num_tokens, segments=[Segment("action", 0, num_tokens)], version_runs=piece.version_runs, state=None
    )
    arrays = {"token_ids": piece.token_ids, "logprobs": piece.logprobs}
    received = decode(encode(chunk, arrays, 1))
    require(received.arrays["token_ids"].tolist() == piece.token_ids.tolist(), "other tokens arrived")


@cache
def output_seeds() -> list[bytes]:
    def event(start: int, ids: list[int], version: str = "3", **more: Any) -> dict[str, Any]:
        entries = [[-0.5 - each / 100, each, None] for each in ids]
        meta = {"completion_tokens": start + len(ids), "weight_version": version, "output_token_logprobs": entries}
        return {"output_ids": ids, "meta_info": meta | more}

    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    end = {"finish_reason": {"type": "stop", "matched": 2}}
    answers = [
        ["+", event(0, [5, 6]), event(2, [7, 8]), event(4, [2], finish_reason={"type": "length"}, weight_versions=None)],
        ["-", event(0, [5]), event(0, [5, 6, 7]), event(0, [5, 6, 7, 8, 2], "4", weight_versions=spans, **end)],
        ["+", event(0, [5, 6, 7, 8, 2], "4", weight_versions=spans, **end)],
        ["+", {"error": {"message": "too long"}}],
        ["+", event(0, [], finish_reason={"type": "abort", "message": "x", "status_code": 400})],
    ]
    return [b"\n".join([each[0].encode(), *(json.dumps(part).encode() for part in each[1:])]) for each in answers]  # type: ignore[attr-defined]


def answer(data: bytes) -> None:
    """Answers that are read at once: the struct, or EngineError."""
    for kind in ANSWERS:
        try:
            found = decode_answer(data, kind)
        except EngineError as error:
            require(len(str(error)) < 4096, f"an error of {len(str(error))} characters")
            continue
        again = decode_answer(msgspec.json.encode(found), kind)
        require(repr(again) == repr(found), "an answer changed when it was written")


@cache
def answer_seeds() -> list[bytes]:
    info = {"version": "0.5.23", "device": "cpu", "dtype": "float32", "tp_size": 1, "model_path": "m", "extra": {"a": [1]}}
    plain = [
        info,
        {"weight_version": "7"},
        {"ranks": [{"checksums": {"model.norm.weight": "0123456789abcdef"}}]},
    ]
    return [json.dumps(each).encode() for each in plain]


def action(data: bytes) -> None:
    """A model's text, as a calculator call and as an answer: a number in bounds or ValueError, and a valid step."""
    text = data.decode(errors="replace")
    try:
        value = evaluate(text)
        require(abs(value) <= MAX_RESULT, f"{text!r} is {value}")
    except ValueError as error:
        require(len(str(error)) < 200, "the model gets a long error")
    for made, problem in ((Calculator(CalculatorOptions()), "34*57"), (Arithmetic(ArithmeticOptions()), "3+4")):
        state = made.start({"problem": problem}, 1).state
        for said in (text, f"[{text}]"):
            step = made.step(state, said)
            require(step.reward in (0.0, 1.0), f"reward {step.reward}")  # type: ignore[comparison-overlap]
            require(bool(step.messages) != step.done, "an episode neither ends nor continues")


@cache
def action_seeds() -> list[bytes]:
    return [
        b"34*57",
        b"-(3+4)*(12/4)-1",
        b"[34*57]",
        b"1938",
        b"((((((1))))))",
        b"--5*/(",
        b"9" * 60,
        "٣+٤".encode(),
        b"1/0",
    ]


def safetensors(data: bytes) -> None:
    """Tensors of a manifest, as JSON [name, dtype, shape]: a file that SGLang's reader accepts, or ValueError."""
    try:
        described = json.loads(data)
        tensors = [(msgspec.convert(_info(each), TensorInfo), bytes(_size(each))) for each in described[:8]]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return
    path = scratch() / "fuzz.safetensors"
    try:
        write_safetensors(path, tensors)
    except ValueError:
        return
    found = {name: (SAFETENSORS_NAMES[each["dtype"]], each["shape"]) for name, each in deserialize(path.read_bytes())}
    require(found == {info.name: (info.dtype, list(info.shape)) for info, _ in tensors}, f"{found} was read")


def _size(described: Any) -> int:
    _, dtype, shape = described
    size = int(np.prod([min(max(int(each), 0), 64) for each in shape[:4]], dtype=np.int64))
    return size * (4 if dtype == "float32" else 2)


def _info(described: Any) -> list[Any]:
    name, dtype, shape = described
    return [name, dtype, [min(max(int(each), 0), 64) for each in shape[:4]], 0, _size(described), "0" * 64]


@cache
def safetensors_seeds() -> list[bytes]:
    given = [
        [["model.norm.weight", "float32", [4]], ["lm_head.weight", "bfloat16", [8, 3]]],
        [['a"b\\c\u00e9\n', "float16", [0]], ["s", "float32", []]],
        [["__metadata__", "float32", [1]]],
    ]
    return [json.dumps(each).encode() for each in given]


def state(data: bytes) -> None:
    """A calculator's state from a lease, as JSON: a step or ValueError."""
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(plain, dict):
        return
    for made in (Calculator(CalculatorOptions()), Arithmetic(ArithmeticOptions())):
        try:
            step = made.step(plain, "[1+1]")
        except ValueError:
            continue
        require(repr(msgpack.unpackb(msgpack.packb(step.state))) == repr(step.state), "a state changed on the wire")


@cache
def state_seeds() -> list[bytes]:
    return [b'{"problem": "3*4", "num_turns": 0}', b'{"problem": "3+4"}']


def mutate_action(data: bytes, rng: Random) -> bytes:
    """Insert a character of an expression, or change bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice((b"(", b")", b"-", b"*", b"/", b"[", b"]", b"9", b"0", b" ", b"\n")) + data[at:]


TARGETS = (
    Target(name="stream", run=stream, seeds=stream_seeds, mutate=mutate_lines, cases=1_200_000, max_bytes=512),
    Target(name="output", run=output, seeds=output_seeds, mutate=mutate_json_lines, cases=1_000_000),
    Target(name="answer", run=answer, seeds=answer_seeds, mutate=mutate_json, cases=900_000),
    Target(name="action", run=action, seeds=action_seeds, mutate=mutate_action, cases=800_000, max_bytes=256),
    Target(name="state", run=state, seeds=state_seeds, mutate=mutate_json, cases=300_000),
    Target(name="safetensors", run=safetensors, seeds=safetensors_seeds, mutate=mutate_json, cases=200_000),
)
