"""The head: log-probabilities of given tokens, and a model that returns them instead of logits."""

from gspo.model.logprobs.chunks import CHUNK_BYTES, KEPT_BYTES, TokenLogProbs, chunked_logprobs, rows_at_once
from gspo.model.logprobs.head import LogProbHead, Scored, attach_logprob_head

__all__ = [
    "CHUNK_BYTES",
    "KEPT_BYTES",
    "LogProbHead",
    "Scored",
    "TokenLogProbs",
    "attach_logprob_head",
    "chunked_logprobs",
    "rows_at_once",
]
