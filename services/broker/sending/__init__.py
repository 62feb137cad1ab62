"""Batches as the learner gets them: what one consists of, and its tokens in parts that are read when they are sent."""

from gspo_services.broker.sending.batches import (
    StoredBatch,
    TokenSpan,
    batch_of_groups,
    members_of,
    recorded_batch,
    span_of,
)
from gspo_services.broker.sending.sender import BatchSender

__all__ = ["BatchSender", "StoredBatch", "TokenSpan", "batch_of_groups", "members_of", "recorded_batch", "span_of"]
