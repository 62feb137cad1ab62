"""Bodies of forward_backward, and the answers that clients want in protobuf. Pure.

What is wrong in a body is the matter of its sender: a UserError says which datum and what it should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from gspo.token_loss_names import GIVEN, optional_inputs, require_token_loss
from gspo_services.serve.calls import ClientDatum, TrainCall, UserError
from gspo_services.serve.schema import (
    FLOAT32,
    INT32,
    INT64,
    STOPPED,
    TOO_LONG,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
)

TARGETS: Final = "target_tokens"
_ELEMENTS: Final[Mapping[int, np.dtype[Any]]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
_NAMES: Final = {FLOAT32: "float32", INT64: "int64", INT32: "int32"}


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """What one call may hold."""

    vocabulary: int
    longest: int
    """Tokens of a sequence."""
    max_datums: int = 1024
    max_targets: int = 4 * 2**20
    """Of all datums together: a sparse tensor is small and means much."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """One sampled sequence. Tokens with their log-probs, and perhaps the k likeliest tokens at each place, [n, k]."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stopped: bool
    topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None


def call_address(body: bytes) -> tuple[str, int]:
    """Return model_id and seq_id of a forward_backward. Raises: UserError when the body is no such message."""
    request = _read(body)
    return request.model_id, request.seq_id


def _read(body: bytes) -> Any:
    try:
        return ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest in protobuf: {error}") from error


def read_train_call(body: bytes, limits: CallLimits) -> TrainCall:
    """Read a forward_backward. Raises: UserError that says what is wrong, with the value and the way out."""
    request = _read(body)
    # The older field holds what the newer one does, as far as it is numbers.
    options: dict[str, Any] = {
        **request.loss_fn_config,
        **{
            key: value.number if value.HasField("number") else value.text for key, value in request.loss_fn_config_v2.items()
        },
    }
    try:
        require_token_loss(request.loss_fn, options)
    except ValueError as error:
        raise UserError(str(error)) from error
    if not 1 <= len(request.data) <= limits.max_datums:
        raise UserError(f"the call has {len(request.data)} datums; send 1 to {limits.max_datums} in a call")
    datums, num_targets = [], 0
    for index, message in enumerate(request.data):
        try:
            datum = _datum(message, request.loss_fn, limits, limits.max_targets - num_targets)
        except UserError as error:
            raise UserError(f"datum {index}: {error}") from error
        num_targets += datum.targets.size
        datums.append(datum)
    if len({datum.targets.shape[1:] for datum in datums}) > 1:
        raise UserError(f"{TARGETS} have {sorted({datum.targets.shape[1:] for datum in datums})} columns; send each K alone")
    return TrainCall(datums=tuple(datums), loss=request.loss_fn, options=options, forward_only=request.forward_only)


def _datum(message: Any, loss: str, limits: CallLimits, room: int) -> ClientDatum:
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise UserError("model_input has a chunk that is no text; this service trains on tokens alone")
        parts.append(_values("model_input", chunk.encoded_text.tokens, np.dtype("<i4")))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
    if not 1 <= len(tokens) <= limits.longest:
        raise UserError(f"model_input has {len(tokens)} tokens; it must have 1 to {limits.longest}")
    _require_ids("model_input", tokens, limits.vocabulary)
    known = (*GIVEN[loss], *optional_inputs(loss))
    given = {}
    for name, tensor in message.loss_fn_inputs.items():
        if name not in (TARGETS, *known):
            raise UserError(f"loss_fn_inputs has {name!r}, which {loss} does not use; it uses {TARGETS}, {', '.join(known)}")
        given[name] = _tensor(name, tensor, (INT64, INT32) if name == TARGETS else (FLOAT32,), room)
    lacking = [name for name in (TARGETS, *GIVEN[loss]) if name not in given]
    if lacking:
        raise UserError(f"loss_fn_inputs has no {lacking[0]}, which {loss} needs")
    targets = given.pop(TARGETS).astype(np.int64)
    most = 2 if loss == "cross_entropy" else 1
    if not 1 <= targets.ndim <= most or len(targets) != len(tokens) or not targets.size:
        forms = f"[{len(tokens)}]" + (f" or [{len(tokens)}, K]" if most > 1 else "")
        raise UserError(f"{TARGETS} is {list(targets.shape)}; it must be {forms}: a target for each token of model_input")
    _require_ids(TARGETS, targets, limits.vocabulary)
    for name, values in given.items():
        if values.shape != targets.shape:
            raise UserError(f"{name} is {list(values.shape)}; it must be {list(targets.shape)}, as {TARGETS}")
        if not np.isfinite(values).all():
            place = tuple(int(each) for each in np.argwhere(~np.isfinite(values))[0])
            raise UserError(f"{name}{list(place)} is {values[place]}; only finite values can be trained on")
    return ClientDatum(tokens_N=tokens, targets=targets, given=given)


def _require_ids(name: str, ids: NDArray[np.int64], vocabulary: int) -> None:
    if ids.min() < 0 or ids.max() >= vocabulary:
        wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
        raise UserError(f"{name} holds {wrong}; the model's tokens are 0 to {vocabulary - 1}")


def _tensor(name: str, message: Any, kinds: Sequence[int], room: int) -> NDArray[Any]:
    if message.dtype not in kinds:
        wanted, found = _NAMES[kinds[0]], _NAMES.get(message.dtype, f"type {message.dtype}")
        raise UserError(f"{name} is {found}; it must be {wanted}")
    kind, shape = _ELEMENTS[message.dtype], tuple(message.shape)
    if message.HasField("sparse_csr"):
        return _from_sparse(name, message.sparse_csr, kind, shape, room)
    values = _values(name, message.dense, kind)
    if not shape:
        return values
    if len(shape) > 2 or min(shape) < 0 or shape[0] * (shape[1] if len(shape) > 1 else 1) != len(values):
        raise UserError(f"{name} has {len(values)} values and the shape {list(shape)}; they must belong together")
    return values.reshape(shape)


def _from_sparse(name: str, message: Any, kind: np.dtype[Any], shape: tuple[int, ...], room: int) -> NDArray[Any]:
    values = _values(name, message.values, kind)
    rows, columns = (_values(name, data, _ELEMENTS[INT64]) for data in (message.crow_indices, message.col_indices))
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] > room:
        raise UserError(f"{name} is sparse with the shape {list(shape)}; send two dimensions, and at most {room} values")
    sound = (
        len(rows) == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == len(values) == len(columns)
        and bool((np.diff(rows) >= 0).all())
        and (not len(columns) or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not sound:
        raise UserError(f"{name} is no sparse tensor of {list(shape)}: its rows, columns and values do not belong together")
    dense = np.zeros(shape, dtype=kind)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _values(name: str, data: bytes, kind: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % kind.itemsize:
        raise UserError(f"{name} has {len(data)} bytes, which is no whole number of {kind.itemsize}-byte values")
    return np.frombuffer(data, dtype=kind)


def train_answer(logprobs: Sequence[NDArray[np.float32]], loss: float) -> bytes:
    """The answer to a forward_backward: log-probs of each datum's targets, all [N] or all [N, K], and the sum of losses."""
    answer = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    answer.metrics["loss:sum"] = loss
    record = answer.loss_fn_outputs.add(num_datums=len(logprobs))
    field = record.fields["logprobs"]
    field.dtype, field.data = FLOAT32, b"".join(each.astype("<f4").tobytes() for each in logprobs)
    # In bytes, one more than there are datums.
    field.offsets = np.cumsum([0, *(4 * each.size for each in logprobs)]).astype("<i8").tobytes()
    field.trailing_shape.extend(logprobs[0].shape[1:])
    # The same answer has the same bytes: what is executed again after a restart is compared with it.
    return bytes(answer.SerializeToString(deterministic=True))


def sample_answer(
    sequences: Sequence[Sampled],
    prompt_logprobs: NDArray[np.float32] | None = None,
    prompt_topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None,
) -> bytes:
    """The answer to an asample. ``prompt_logprobs``: NaN where there is none; ``prompt_topk``: both [prompt, k]."""
    answer = SampleResponse()
    for each in sequences:
        added = answer.sequences.add(
            stop_reason=STOPPED if each.stopped else TOO_LONG,
            tokens=each.tokens.astype("<i4").tobytes(),
            logprobs=each.logprobs.astype("<f4").tobytes(),
        )
        if each.topk is not None:
            _fill_topk(added.topk_sampled_logprobs, *each.topk)
    if prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if prompt_topk is not None:
        _fill_topk(answer.topk_prompt_logprobs, *prompt_topk)
    return bytes(answer.SerializeToString())


def _fill_topk(message: Any, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
    message.length, message.k = token_ids.shape
    message.token_ids, message.logprobs = token_ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes()
