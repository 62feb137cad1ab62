"""A patch's directory as a tensor that SGLang reads, made without torch; and the ranks' answers."""

import base64
import json
from pathlib import Path

import pytest
import torch

from gspo_services.rollout.sglang.http import EngineError
from gspo_services.rollout.sglang.patching import require_patched, tensor_payload
from gspo_services.shared.weights import answer_file


@pytest.mark.parametrize("data", [b"", b"/dev/shm/a patch", bytes(range(256)), "/tmp/wörk".encode()])
def test_sglang_reads_the_bytes_as_a_tensor(data: bytes) -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    ((name, tensor),) = MultiprocessingSerializer.deserialize(tensor_payload(data))
    assert name == "patch"
    assert tensor.dtype == torch.uint8
    assert bytes(tensor.tolist()) == data
    assert base64.b64decode(tensor_payload(data), validate=True)


def test_every_rank_must_answer_that_it_has_patched(tmp_path: Path) -> None:
    (tmp_path / answer_file(0)).write_text(json.dumps({"elements": 3}))
    require_patched(tmp_path, 1)
    with pytest.raises(EngineError, match="rank 1 were not patched: it has not answered"):
        require_patched(tmp_path, 2)
    (tmp_path / answer_file(1)).write_text(json.dumps({"error": "ValueError: places 4 to 4"}))
    with pytest.raises(EngineError, match="rank 1 were not patched: ValueError: places 4 to 4"):
        require_patched(tmp_path, 2)
    (tmp_path / answer_file(0)).write_text("{")
    with pytest.raises(EngineError, match="rank 0 were not patched: it has not answered"):
        require_patched(tmp_path, 2)
