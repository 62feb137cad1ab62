"""SGLang's checksums of what a server holds, on all cores.

/weights_checker hashes one parameter after the other, and nothing is generated meanwhile: of the pause of a weight update
that was a third. SHA-256 releases the interpreter lock, so the same parameters are hashed side by side, to the same values.
On a GPU SGLang hashes in a kernel, and this is not used.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any


def hash_side_by_side(weight_checker: ModuleType, num_threads: int) -> None:
    """Replace, in `sglang.srt.utils.weight_checker`, how `WeightChecker` gets its checksums.

    It puts the hash of each parameter into a dictionary by name, and then asks for the hash of all of them: here it puts
    what is still being worked out there, which the last step waits for.
    """
    hash_tensor: Callable[[Any], str] = weight_checker._hash_tensor
    overall_checksum: Callable[[dict[str, str]], str] = weight_checker.overall_checksum
    # Threads start with the first checksums: what is forked before that has none.
    pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="checksum")

    def begin(tensor: Any) -> Future[str]:
        return pool.submit(hash_tensor, tensor)

    def finish(checksums: dict[str, Any]) -> str:
        for name, future in checksums.items():
            checksums[name] = future.result()
        return overall_checksum(checksums)

    weight_checker._hash_tensor = begin  # type: ignore[attr-defined]
    weight_checker.overall_checksum = finish  # type: ignore[attr-defined]
