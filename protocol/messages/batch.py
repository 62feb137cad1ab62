"""Messages of the batch channel, learner <-> broker: batches, publications, checkpoints."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from protocol import limits
from protocol.messages.base import (
    Count,
    Message,
    Name,
    Reason,
    Version,
    check_tokens,
)
from protocol.messages.pieces import PIECE_ARRAYS, check_pieces


class BatchRequest(Message, frozen=True, tag="batch_request"):
    """Learner -> broker: wants batch ``index``, to be trained at ``policy_version``. Repeated until answered: the same
    index always gets the same batch.
    """

    index: Count
    policy_version: Version


class BatchPending(Message, frozen=True, tag="batch_pending"):
    """Broker -> learner: batch ``index`` is not complete yet, and what it waits for, so that no wait is silent."""

    index: Count
    groups_ready: Count
    groups_needed: Count
    waiting_for: Reason


class BatchItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One trajectory of a batch: how much of each of the batch's arrays is its own, next."""

    trajectory_id: Count
    group_id: Count
    num_tokens: Count
    num_segments: Count
    num_runs: Count
    num_turns: Count
    reason: Literal["done", "length"]


class Batch(Message, frozen=True, tag="batch"):
    """Broker -> learner: whole groups for one policy version, in a recorded order.

    ``policy_version`` is the version for which the batch was first assembled: lag is counted from it, also when the batch
    is delivered again after a restart of the learner.
    """

    LARGE_HEADER: ClassVar[bool] = True

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "int32", "logprobs": "float32", **PIECE_ARRAYS}

    index: Count
    policy_version: Version
    temperature: float
    items: Annotated[list[BatchItem], Meta(min_length=1, max_length=limits.MAX_TRAJECTORIES_PER_BATCH)]

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        num_tokens = sum(item.num_tokens for item in self.items)
        check_tokens(arrays, num_tokens)
        check_pieces(arrays, num_tokens)
        for name, counted in (
            ("segments", sum(item.num_segments for item in self.items)),
            ("version_runs", sum(item.num_runs for item in self.items)),
            ("turn_rewards", sum(item.num_turns for item in self.items)),
        ):
            if len(arrays[name]) != counted:
                raise ValueError(f"array {name} has {len(arrays[name])} rows, the items {counted}")

    def split(
        self, arrays: Mapping[str, np.ndarray[Any, Any]]
    ) -> Iterator[tuple[BatchItem, dict[str, np.ndarray[Any, Any]]]]:
        """Each item with its parts of the arrays."""
        at = dict.fromkeys(self.ARRAYS, 0)
        for item in self.items:
            sizes = (item.num_tokens, item.num_tokens, item.num_segments, item.num_runs, item.num_turns)
            parts = {}
            for name, size in zip(self.ARRAYS, sizes, strict=True):
                parts[name] = arrays[name][at[name] : at[name] + size]
                at[name] += size
            yield item, parts


class SkipBatch(Message, frozen=True, tag="skip_batch"):
    """Broker -> learner: batch ``index`` was set aside, and ``reason`` says why. Nothing is trained for it; the learner
    publishes its weights as the next version, so that batches and versions stay in step.
    """

    index: Count
    reason: Reason


class VersionScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How one version did on the held-out tasks."""

    policy_version: Version
    under_way: bool
    reward: float | None
    """The mean over the tasks that finished; None while the evaluation is under way, and if none finished."""


class Evaluated(Message, frozen=True, tag="evaluated"):
    """Broker -> learner: one evaluation has begun or ended; after a Resume, all that there were. It may get lost: then the
    next Resume brings it. The learner keeps the checkpoint of the best version.
    """

    LARGE_HEADER: ClassVar[bool] = True

    scores: Annotated[list[VersionScore], Meta(max_length=limits.MAX_EVALUATIONS)]

    def check_plain(self) -> None:
        for place, score in enumerate(self.scores):
            if score.reward is not None and not abs(score.reward) <= limits.MAX_REWARD:
                raise ValueError(
                    f"scores[{place}].reward is {score.reward}: a reward is a number up to {limits.MAX_REWARD:g} "
                    "(MAX_REWARD)"
                )


class EndOfRun(Message, frozen=True, tag="end_of_run"):
    """Broker -> learner: there is no batch ``index``: the run is complete (or stops) after the batches before it."""

    index: Count
    reason: Reason


class Published(Message, frozen=True, tag="published"):
    """Learner -> broker: ``policy_version`` can be fetched at ``endpoint`` now. Durable: a version is never given to other
    weights. A learner that restarts publishes the newest version again if it has the same weights.
    """

    policy_version: Version
    endpoint: Annotated[str, Meta(min_length=1, max_length=1024)]
    digest: Name
    num_bytes: Count
    trained_batches: Count
    """Number of batches that these weights have been trained on."""
    vocabulary: Annotated[int, Meta(ge=1, le=limits.MAX_VOCABULARY)]
    """Token ids that the model has: 0 to vocabulary - 1. The same in every version of a run."""


class Trained(Message, frozen=True, tag="trained"):
    """Learner -> broker: batch ``index`` has been trained; its metrics, for metrics.jsonl.

    ``skipped``: nothing was trained, because the broker has set the batch aside.
    """

    index: Count
    policy_version: Version
    """The version that it made; 0 for a batch that is trained again before the newest version is reached: it makes none."""
    metrics: Annotated[dict[str, float | None], Meta(max_length=limits.MAX_METRICS)]
    skipped: bool = False


class BatchFailed(Message, frozen=True, tag="batch_failed"):
    """Learner -> broker, before it ends: it could not train batch ``index``.

    ``raised``: training raised, and ``reason`` is the error. Otherwise one of the learner's ranks ended without a word
    meanwhile, as a learner of one rank does when it is killed.
    """

    index: Count
    reason: Reason
    raised: bool


class Checkpointed(Message, frozen=True, tag="checkpointed"):
    """Learner -> broker: a durable checkpoint covers all batches below ``next_batch``; they are not delivered again."""

    next_batch: Count
    policy_version: Version


class Resume(Message, frozen=True, tag="resume"):
    """Learner -> broker, after Hello: the checkpoint it starts from covers all batches below ``next_batch``."""

    next_batch: Count
