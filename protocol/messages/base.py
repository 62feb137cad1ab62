"""What all messages share: the base struct, field types with their limits, and checks of tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgpack
import msgspec
import numpy as np
from msgspec import Meta

from gspo_protocol import limits

Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]
ComponentName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
Reason = Annotated[str, Meta(max_length=limits.MAX_REASON_CHARS)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Version = Annotated[int, Meta(ge=0, le=limits.MAX_VERSION)]
Plain = dict[str, Any]
"""Plain data (null, bool, int, float, str, list, dict): tasks and environment states."""

MAX_LOGPROB = 1e-3
"""Rounding can put the log-prob of a certain token a little above 0."""

Role = Literal["rollout", "learner", "operator"]
Split = Literal["train", "eval"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages. ``ARRAYS`` maps the name of an array to its dtype; the codec checks both."""

    ARRAYS: ClassVar[dict[str, str]] = {}
    OPTIONAL_ARRAYS: ClassVar[dict[str, str]] = {}
    """Arrays that follow the others where they are needed: a message without them is what it was before there were any."""
    LARGE_HEADER: ClassVar[bool] = False
    """The header may have MAX_LARGE_HEADER_BYTES instead of MAX_HEADER_BYTES."""

    def check_plain(self) -> None:
        """Check the fields that hold plain data from users' code. Raises: ValueError with the field and what it holds."""

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Check the arrays against the fields; names and dtypes are checked already.

        Raises: ValueError with the array's name, the place and the value.
        """


SegmentKind = Literal["action", "observation", "discarded"]


class VersionRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """``num_tokens`` consecutive tokens made by one policy version (-1: observation tokens, made by none)."""

    version: Annotated[int, Meta(ge=-1, le=limits.MAX_VERSION)]
    num_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CHUNK_TOKENS)]


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Consecutive tokens of one kind: ``action`` (sampled by the policy), ``observation`` (prompt, tool, user), or, in
    batches only, ``discarded`` (sampled by the policy, for a turn that the finished episode does not have)."""

    kind: SegmentKind
    turn: Annotated[int, Meta(ge=0, le=limits.MAX_TURNS)]
    """Turns that are complete before it: an action is the turn of this number, an observation leads to it."""
    num_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CHUNK_TOKENS)]
    sequence: Annotated[int, Meta(ge=0, lt=limits.MAX_SEQUENCES)] = 0
    """The sequence of the trajectory that the tokens belong to: its tokens alone are their context. Sequences are numbered
    as they begin, and may alternate."""


AdapterName = Annotated[str, Meta(max_length=limits.MAX_ADAPTER_NAME)]


class GroupSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How the trajectories of one group are sampled. The broker decides it when the group begins, and it stays: members of a
    group are compared, and the learner divides its logits by the same temperature.
    """

    temperature: Annotated[float, Meta(ge=0, le=limits.MAX_TEMPERATURE)]
    """Divides the logits. 0, which takes the likeliest token, is for evaluations only."""
    max_turn_tokens: Annotated[int, Meta(ge=1, le=2**53)]
    """The most tokens of one action turn."""
    max_tokens: Annotated[int, Meta(ge=2, le=2**53)]
    """The most tokens of a sequence, prompt and observations included."""
    max_episode_tokens: Annotated[int, Meta(ge=2, le=2**53)]
    """The most tokens of a trajectory, over all its sequences."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Below 1 the least likely tokens are left out: in evaluations only, because such tokens cannot be trained on."""
    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_VOCABULARY)] = -1
    """How many of the likeliest tokens are left in; -1: all. In evaluations only."""
    adapter: AdapterName = ""
    """Which of the run's adapters samples, and is trained on the answers; empty: there is one, or none."""


class TrainingValues(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the schedules give a batch's optimizer steps. None: not scheduled, and the learner's own setting holds."""

    learning_rate: Annotated[float, Meta(gt=0)] | None = None
    eps_low: Annotated[float, Meta(gt=0)] | None = None
    eps_high: Annotated[float, Meta(gt=0)] | None = None


def shortened(text: str) -> str:
    """``text`` as a Reason: in valid Unicode, and its beginning, where it is too long for one."""
    most = limits.MAX_REASON_CHARS
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= most else text[: most - 3] + "..."


def require_rewards(field: str, values: Sequence[float], before: float = 0.0) -> float:
    """The sum of the absolute values, with that of the turns ``before``.

    Raises: ValueError naming the first place with a NaN or an infinity, or the sum when it is too large to be trained on.
    """
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"{field}[{index}] is {value}: a reward must be a finite number")
    size = before + sum(map(abs, values))
    if size > limits.MAX_REWARD:
        raise ValueError(
            f"{field} has a sum of absolute values of {size:g}, {limits.MAX_REWARD:g} allowed (MAX_REWARD): scale the "
            "environment's rewards"
        )
    return size


def require_components(field: str, values: Mapping[str, float]) -> None:
    """Raises: ValueError naming the first component of a reward that is not finite, or too large for a mean."""
    for name, value in values.items():
        if not abs(value) <= limits.MAX_REWARD:
            raise ValueError(
                f"{field}[{name!r}] is {value}: a component is a number up to {limits.MAX_REWARD:g} (MAX_REWARD)"
            )


def require_plain(field: str, value: Any, max_bytes: int | None = None) -> None:
    """Check that ``value`` is plain data throughout, which a codec or a store returns unchanged.

    Raises: ValueError naming the field for other types (bytes, dates), keys that are not text, data nested too deeply, and
    data of more than ``max_bytes`` as msgpack.
    """
    _require_levels(field, value)
    if max_bytes is not None and value is not None:
        num_bytes = len(msgpack.packb(value, use_bin_type=True))
        if num_bytes > max_bytes:
            raise ValueError(f"{field} has {num_bytes} bytes, {max_bytes} allowed")


def _require_levels(field: str, value: Any) -> None:
    level = [value]
    for _ in range(limits.MAX_PLAIN_DEPTH + 1):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                for key in node:
                    if not isinstance(key, str):
                        raise ValueError(f"{field} holds a key of type {type(key).__name__}: keys are text")
                below += node.values()
            elif isinstance(node, list | tuple):
                below += node
            elif not (node is None or isinstance(node, bool | int | float | str)):
                raise ValueError(f"{field} holds a {type(node).__name__}: expected null, bool, number, text, list or map")
        if not below:
            return
        level = below
    raise ValueError(f"{field} is nested more than {limits.MAX_PLAIN_DEPTH} levels deep (MAX_PLAIN_DEPTH)")


def require_total(num_tokens: int, segments: list[Segment], version_runs: list[VersionRun]) -> None:
    """Raises: ValueError when segments or version runs do not cover exactly ``num_tokens``."""
    for field, total in (
        ("segments", sum(segment.num_tokens for segment in segments)),
        ("version_runs", sum(run.num_tokens for run in version_runs)),
    ):
        if total != num_tokens:
            raise ValueError(f"{field} cover {total} tokens, num_tokens is {num_tokens}")


def check_tokens(arrays: Mapping[str, np.ndarray[Any, Any]], num_tokens: int) -> None:
    """Check ``token_ids`` and ``logprobs``. Raises: ValueError naming the array, the place and the value."""
    for name in ("token_ids", "logprobs"):
        if arrays[name].shape != (num_tokens,):
            raise ValueError(f"array {name} has shape {arrays[name].shape}, num_tokens is {num_tokens}")
    if not num_tokens:
        return
    if int(arrays["token_ids"].min()) < 0:
        raise ValueError(f"array token_ids holds {int(arrays['token_ids'].min())}: token ids are not negative")
    # A NaN fails both comparisons.
    bad = ~((arrays["logprobs"] >= limits.MIN_LOGPROB) & (arrays["logprobs"] <= MAX_LOGPROB))
    if bad.any():
        place = int(bad.argmax())
        value = float(arrays["logprobs"][place])
        raise ValueError(f"array logprobs[{place}] is {value}: expected a log-prob ({limits.MIN_LOGPROB:g} to 0)")
