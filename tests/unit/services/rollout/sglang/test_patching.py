"""A patch's directory as a tensor that SGLang reads, made without torch; and the ranks' answers."""

import base64
import json
from pathlib import Path

import pytest
import torch

from gspo_services.rollout.sglang.http import EngineError
from gspo_services.rollout.sglang.patching import read_sums, require_answers, tensor_payload
from gspo_services.shared.weights import answer_file, sums_file


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
    require_answers(tmp_path, 1, "not patched")
    with pytest.raises(EngineError, match="rank 1 were not patched: it has not answered"):
        require_answers(tmp_path, 2, "not patched")
    (tmp_path / answer_file(1)).write_text(json.dumps({"error": "ValueError: places 4 to 4"}))
    with pytest.raises(EngineError, match="rank 1 were not patched: ValueError: places 4 to 4"):
        require_answers(tmp_path, 2, "not patched")
    (tmp_path / answer_file(0)).write_text("{")
    with pytest.raises(EngineError, match="rank 0 were not patched: it has not answered"):
        require_answers(tmp_path, 2, "not patched")


def test_sums_that_are_absent_or_no_numbers_are_an_error(tmp_path: Path) -> None:
    answer = tmp_path / answer_file(0)
    answer.write_text(json.dumps({"sizes": {"a": 3}, "others": {"b": "digest"}}))
    with pytest.raises(EngineError, match="sums of the parameters of rank 0 cannot be read"):
        read_sums(tmp_path, 1)
    (tmp_path / sums_file(0)).write_bytes(bytes(16))
    (found,) = read_sums(tmp_path, 1)
    assert (found.sizes, found.sums.tolist(), found.others) == ({"a": 3}, [0, 0], {"b": "digest"})
    (tmp_path / sums_file(0)).write_bytes(bytes(15))
    with pytest.raises(EngineError, match="cannot be read"):
        read_sums(tmp_path, 1)
    for wrong in ({"a": "many"}, None, [1]):
        answer.write_text(json.dumps({"sizes": wrong, "others": {}}))
        with pytest.raises(EngineError, match="cannot be read"):
            read_sums(tmp_path, 1)
        answer.write_text(json.dumps({"sizes": {}, "others": wrong and {"a": 3}}))
        with pytest.raises(EngineError, match="cannot be read"):
            read_sums(tmp_path, 1)
    answer.write_text("[]")
    with pytest.raises(EngineError, match="were not summed"):
        read_sums(tmp_path, 1)
