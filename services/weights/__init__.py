"""What learner and rollouts share for weights: SGLang's parameters and checksums, compression, serving chunks."""

from services.weights.adapters import (
    MODULES,
    PEFT_PREFIX,
    REPORTS_SLOTS,
    SLOT,
    peft_config,
    require_matrices,
    slot_checksums,
    slot_name,
)
from services.weights.checksums import Hash, engine_hash, hash_function, xxh3_checksum
from services.weights.compression import compress, decompress
from services.weights.engine_parameters import (
    EMBEDDING,
    HEAD,
    Buffer,
    Layout,
    Parameter,
    checksums_of,
    layouts,
    merge,
    parts_of,
)
from services.weights.patches import ABILITY, INDICES, LOAD_FORMAT, VALUES, patch_file
from services.weights.served import ServedError, require_served
from services.weights.server import ChunkServer, Parts
from services.weights.shards import Shard, ShardBytes, ShardChecksums, ShardPiece, shards
from services.weights.spread import ONE_RANK, Spread, SpreadError, kv_heads, require_spread, spread_of
from services.weights.tiles import WORD_BYTES, TileSums

__all__ = [
    "ABILITY",
    "EMBEDDING",
    "HEAD",
    "INDICES",
    "LOAD_FORMAT",
    "MODULES",
    "ONE_RANK",
    "PEFT_PREFIX",
    "REPORTS_SLOTS",
    "SLOT",
    "VALUES",
    "WORD_BYTES",
    "Buffer",
    "ChunkServer",
    "Hash",
    "Layout",
    "Parameter",
    "Parts",
    "ServedError",
    "Shard",
    "ShardBytes",
    "ShardChecksums",
    "ShardPiece",
    "Spread",
    "SpreadError",
    "TileSums",
    "checksums_of",
    "compress",
    "decompress",
    "engine_hash",
    "hash_function",
    "kv_heads",
    "layouts",
    "merge",
    "parts_of",
    "patch_file",
    "peft_config",
    "require_matrices",
    "require_served",
    "require_spread",
    "shards",
    "slot_checksums",
    "slot_name",
    "spread_of",
    "xxh3_checksum",
]
