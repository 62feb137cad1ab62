"""What learner and rollouts share for weights: SGLang's parameters and checksums, compression, serving chunks."""

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
from services.weights.patches import ABILITY, INDICES, LOAD_FORMAT, VALUES
from services.weights.server import ChunkServer, Parts
from services.weights.tiles import WORD_BYTES, TileSums

__all__ = [
    "ABILITY",
    "EMBEDDING",
    "HEAD",
    "INDICES",
    "LOAD_FORMAT",
    "VALUES",
    "WORD_BYTES",
    "Buffer",
    "ChunkServer",
    "Hash",
    "Layout",
    "Parameter",
    "Parts",
    "TileSums",
    "checksums_of",
    "compress",
    "decompress",
    "engine_hash",
    "hash_function",
    "layouts",
    "merge",
    "parts_of",
    "xxh3_checksum",
]
