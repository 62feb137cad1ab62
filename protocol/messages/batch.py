"""Messages of the batch channel, learner <-> broker: batches, publications, checkpoints."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from gspo_protocol import limits
from gspo_protocol.messages.base import (
    AdapterName,
    Count,
    Message,
    Name,
    Reason,
    TrainingValues,
    Version,
    check_tokens,
)
from gspo_protocol.messages.experts import EXPERT_ARRAYS, ModelExperts, check_experts, sampled_between
from gspo_protocol.messages.pieces import SPAN_ARRAYS, check_rewards, check_spans


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
    """One trajectory of a batch: how many of the batch's tokens are its own, next, and of each array's rows."""

    trajectory_id: Count
    group_id: Count
    num_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_BATCH_TOKENS)]
    num_sequences: Annotated[int, Meta(ge=0, le=limits.MAX_SEQUENCES)]
    """Sequences that are trained: one without an action is not, unless it is the trajectory's only one."""
    num_turns: Count
    oldest_version: Version
    """Oldest version of a trained action token; 0 without any."""
    reason: Literal["done", "length"]
    temperature: Annotated[float, Meta(gt=0, le=limits.MAX_TEMPERATURE)]
    """The sampling temperature of its group."""
    max_tokens: Annotated[int, Meta(ge=2, le=2**53)]
    """The most tokens that a sequence of its group could have."""
    adapter: AdapterName = ""
    """The adapter that sampled it, of several."""


class Batch(Message, frozen=True, tag="batch"):
    """Broker -> learner: what whole groups for one policy version consist of, in a recorded order, without their tokens.

    The tokens follow in parts, as one row of the items' tokens that is cut every ``part_tokens`` tokens; the first part
    comes unasked. What a rank trains on is decided from this message alone.
    ``policy_version`` is the version for which the batch was first assembled: lag is counted from it, also when the batch
    is delivered again after a restart of the learner.

    Arrays, end to end over the items: ``turn_rewards`` float64 [turns]; ``sequences`` int32 [sequences, 2]: tokens, and
    action tokens among them; ``turn_roles`` uint8 [turns], only where the policy has several roles; ``turn_discarded``
    uint8 [turns], 1 for a turn of an attempt that began again, only where there is one.
    """

    LARGE_HEADER: ClassVar[bool] = True

    ARRAYS: ClassVar[dict[str, str]] = {"turn_rewards": "float64", "sequences": "int32"}
    OPTIONAL_ARRAYS: ClassVar[dict[str, str]] = {"turn_roles": "uint8", "turn_discarded": "uint8"}

    index: Count
    policy_version: Version
    part_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_PART_TOKENS)]
    items: Annotated[list[BatchItem], Meta(min_length=1, max_length=limits.MAX_TRAJECTORIES_PER_BATCH)]
    values: TrainingValues = TrainingValues()
    """Recorded when the batch was assembled."""

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def num_parts(self) -> int:
        return -(-self.num_tokens // self.part_tokens)

    def tokens_of(self, part: int) -> int:
        """Count the tokens of a part. Raises: ValueError for a part that the batch has not."""
        if not 0 <= part < self.num_parts:
            raise ValueError(f"part is {part}: batch {self.index} has {self.num_parts} parts, counted from 0")
        return min(self.part_tokens, self.num_tokens - part * self.part_tokens)

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        if self.num_tokens > limits.MAX_BATCH_TOKENS:
            raise ValueError(f"items have {self.num_tokens} tokens, {limits.MAX_BATCH_TOKENS} allowed (MAX_BATCH_TOKENS)")
        check_rewards(arrays["turn_rewards"])
        roles = arrays.get("turn_roles")
        if roles is not None and (roles.shape != arrays["turn_rewards"].shape or (roles >= limits.MAX_ROLES).any()):
            raise ValueError(f"array turn_roles is not one role from 0 to {limits.MAX_ROLES - 1} for each of turn_rewards")
        discarded = arrays.get("turn_discarded")
        if discarded is not None and (discarded.shape != arrays["turn_rewards"].shape or (discarded > 1).any()):
            raise ValueError("array turn_discarded is not 0 or 1 for each of turn_rewards")
        sequences = arrays["sequences"]
        if sequences.ndim != 2 or sequences.shape[1] != 2:
            raise ValueError(f"array sequences has shape {sequences.shape}, expected rows of 2")
        for name, counted in (
            ("turn_rewards", sum(item.num_turns for item in self.items)),
            ("sequences", sum(item.num_sequences for item in self.items)),
        ):
            if len(arrays[name]) != counted:
                raise ValueError(f"array {name} has {len(arrays[name])} rows, the items {counted}")
        if ((sequences[:, 0] < 1) | (sequences[:, 1] < 0) | (sequences[:, 1] > sequences[:, 0])).any():
            raise ValueError("array sequences holds a sequence without tokens, or with more action tokens than tokens")

    def split(
        self, arrays: Mapping[str, np.ndarray[Any, Any]]
    ) -> Iterator[tuple[BatchItem, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Each item with its turn rewards and its sequences."""
        turn = sequence = 0
        for item in self.items:
            rewards = arrays["turn_rewards"][turn : turn + item.num_turns]
            yield item, rewards, arrays["sequences"][sequence : sequence + item.num_sequences]
            turn, sequence = turn + item.num_turns, sequence + item.num_sequences

    def of_turns(self, name: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]] | None:
        """An optional array with a value for each turn, for each item; None where it was not sent."""
        if name not in arrays:
            return None
        ends = np.cumsum([item.num_turns for item in self.items])
        return np.split(arrays[name], ends[:-1])


class BatchPartRequest(Message, frozen=True, tag="batch_part_request"):
    """Learner -> broker: wants ``count`` parts of batch ``index``, from ``part`` on; it has room for no more of them. What
    does not come is asked for again: the same part is always the same bytes.
    """

    index: Count
    part: Count
    count: Annotated[int, Meta(ge=1, le=limits.MAX_PARTS_AHEAD)]


class BatchPart(Message, frozen=True, tag="batch_part"):
    """Broker -> learner: the tokens of batch ``index`` from ``part * part_tokens`` on, ``part_tokens`` of them or the rest.

    Segments and version runs end where the part ends: the next part continues them. ``digest`` is that of the arrays and
    of their place in the run (``gspo_protocol.digests.part_digest``).
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "int32", "logprobs": "float32", **SPAN_ARRAYS}
    OPTIONAL_ARRAYS: ClassVar[dict[str, str]] = EXPERT_ARRAYS

    index: Count
    part: Count
    digest: Name

    def check_arrays(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        num_tokens = arrays["token_ids"].size
        if not 1 <= num_tokens <= limits.MAX_PART_TOKENS:
            raise ValueError(
                f"array token_ids has {num_tokens} tokens, 1 to {limits.MAX_PART_TOKENS} allowed (MAX_PART_TOKENS)"
            )
        check_tokens(arrays, num_tokens)
        check_spans(arrays, num_tokens)
        check_experts(arrays, sampled_between(arrays["segments"], 0, num_tokens)[1])


class SkipBatch(Message, frozen=True, tag="skip_batch"):
    """Broker -> learner: batch ``index`` was quarantined, and ``reason`` says why. Nothing is trained for it; the learner
    publishes its weights as the next version, so that batches and versions stay in step.
    """

    index: Count
    reason: Reason


class VersionScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One version's score on the held-out tasks."""

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


class Published(Message, frozen=True, tag="published", omit_defaults=True):
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
    experts: ModelExperts | None = None
    """What the experts must be like that engines report, also the same; None: none are replayed, or it is not known."""


class Trained(Message, frozen=True, tag="trained"):
    """Learner -> broker: batch ``index`` has been trained; its metrics, for metrics.jsonl.

    ``skipped``: nothing was trained, because the broker has quarantined the batch.
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
