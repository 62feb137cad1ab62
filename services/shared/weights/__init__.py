"""What learner and rollouts share for weights: SGLang's parameters and checksums, compression, serving in chunks."""

from gspo_services.shared.weights.adapters import (
    MODULES,
    PEFT_PREFIX,
    REPORTS_SLOTS,
    SLOT,
    peft_config,
    require_matrices,
    slot_checksums,
    slot_name,
)
from gspo_services.shared.weights.checksums import Hash, engine_hash, hash_function, xxh3_checksum
from gspo_services.shared.weights.compression import compress, decompress
from gspo_services.shared.weights.engine_parameters import (
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
from gspo_services.shared.weights.patches import ABILITY, INDICES, LOAD_FORMAT, VALUES, patch_file
from gspo_services.shared.weights.served import ServedError, require_servable, require_served, require_served_on_cuda
from gspo_services.shared.weights.server import ChunkServer, Parts
from gspo_services.shared.weights.shards import Shard, ShardBytes, ShardChecksums, ShardPiece, shards
from gspo_services.shared.weights.spread import ONE_RANK, Spread, SpreadError, kv_heads, require_spread, spread_of
from gspo_services.shared.weights.tiles import WORD_BYTES, TileSums, Work

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
    "Work",
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
    "require_servable",
    "require_served",
    "require_served_on_cuda",
    "require_spread",
    "shards",
    "slot_checksums",
    "slot_name",
    "spread_of",
    "xxh3_checksum",
]
