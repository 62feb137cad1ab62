"""SGLang's checksums of what a server holds, on all cores.

/weights_checker hashes one parameter after the other, and nothing is generated meanwhile: of the pause of a weight update
that was a third. SHA-256 releases the interpreter lock, so the same parameters are hashed side by side, to the same values,
while SGLang still walks through the model's modules.
On a GPU SGLang hashes in a kernel, and this is not used.
"""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any


def hash_side_by_side(weight_checker: ModuleType, num_threads: int) -> None:
    """Replace, in `sglang.srt.utils.weight_checker`, how `WeightChecker` gets its checksums.

    For each request it looks which weights are quantised, then puts the hash of each parameter into a dictionary by name,
    and then asks for the hash of all of them. Here the first step begins to hash, the second puts what is still being worked
    out into the dictionary, and the last one waits for it.
    """
    build_quantized_set: Callable[[Any], Any] = weight_checker._build_quantized_set
    hash_tensor: Callable[[Any], str] = weight_checker._hash_tensor
    overall_checksum: Callable[[dict[str, str]], str] = weight_checker.overall_checksum
    # Threads start with the first checksums: what is forked before that has none.
    pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="checksum")
    begun: dict[Hashable, Future[str]] = {}

    def begin(model: Any) -> Any:
        begun.clear()
        begun.update({_place(tensor): pool.submit(hash_tensor, tensor.data) for tensor in model.parameters()})
        return build_quantized_set(model)

    def hash_of(tensor: Any) -> Future[str]:
        # What was not begun is a weight that was computed from a quantised one.
        return begun.get(_place(tensor)) or pool.submit(hash_tensor, tensor)

    def finish(checksums: dict[str, Any]) -> str:
        for name, future in checksums.items():
            checksums[name] = future.result()
        begun.clear()
        return overall_checksum(checksums)

    weight_checker._build_quantized_set = begin  # type: ignore[attr-defined]
    weight_checker._hash_tensor = hash_of  # type: ignore[attr-defined]
    weight_checker.overall_checksum = finish  # type: ignore[attr-defined]


def _place(tensor: Any) -> Hashable:
    """Where its bytes are, and how they are read."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
