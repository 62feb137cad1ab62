"""What both ends of a weight update share: SGLang's parameter layout and checksums, compression, serving chunks."""

from services.weights.checksums import Hash, checksum_of, hash_of, xxh3_checksum
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
    "checksum_of",
    "checksums_of",
    "compress",
    "decompress",
    "hash_of",
    "merge",
    "xxh3_checksum",
]
