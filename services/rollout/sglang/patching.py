"""How a patch is given to SGLang, and what its ranks answer (gspo_services.shared.sglang_patching)."""

import base64
import json
from pathlib import Path

from gspo_services.rollout.sglang.http import EngineError
from gspo_services.shared.weights import answer_file


def tensor_payload(data: bytes) -> str:
    """Return [("patch", ByteTensor of ``data``)] as SGLang reads named tensors: a pickle in base64, made without torch."""
    numbers = b"".join(b"K" + bytes([each]) for each in data)
    tensor = b"ctorch\nByteTensor\n" + b"](" + numbers + b"e" + b"\x85R"
    return base64.b64encode(b"\x80\x02](X\x05\x00\x00\x00patch" + tensor + b"\x86e.").decode()


def require_patched(directory: Path, num_ranks: int) -> None:
    """Raises: EngineError when a rank has not patched its parameters, or has not answered."""
    for rank in range(num_ranks):
        try:
            answer = json.loads((directory / answer_file(rank)).read_bytes())
        except (OSError, ValueError) as error:
            raise EngineError(f"the parameters of rank {rank} were not patched: it has not answered ({error})") from error
        if "error" in answer:
            raise EngineError(f"the parameters of rank {rank} were not patched: {answer['error']}")
