"""What a ledger shares with copies of it elsewhere: each commit's rows, in order, in a log that several brokers read."""

from gspo_services.broker.store.shared_log.content import WrittenRows, decode_rows, encode_rows, rendered, require_sound
from gspo_services.broker.store.shared_log.port import CommitLog, LedgerDiverged

__all__ = ["CommitLog", "LedgerDiverged", "WrittenRows", "decode_rows", "encode_rows", "rendered", "require_sound"]
