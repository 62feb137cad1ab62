"""What learner and rollouts share for weights: SGLang's parameters and checksums, compression, serving chunks."""

from services.weights.checksums import Hash, engine_hash, hash_function, xxh3_checksum
from services.weights.compression import compress, decompress
from services.weights.engine_parameters import EMBEDDING, HEAD, Buffer, Parameter, checksums_of, merge
from services.weights.server import ChunkServer, Parts

__all__ = [
    "EMBEDDING",
    "HEAD",
    "Buffer",
    "ChunkServer",
    "Hash",
    "Parameter",
    "Parts",
    "checksums_of",
    "compress",
    "decompress",
    "engine_hash",
    "hash_function",
    "merge",
    "xxh3_checksum",
]
