"""What the learner computed for each token of a batch: small files beside a run, which tools read."""

from services.token_record.batch_file import TOKEN_DIRECTORY, TokenPart, read_parts, recorded_batches, write_part

__all__ = ["TOKEN_DIRECTORY", "TokenPart", "read_parts", "recorded_batches", "write_part"]
