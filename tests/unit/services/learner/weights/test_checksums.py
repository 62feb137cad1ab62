"""What engines must report for a version, computed once and from what was known of the version before."""

from typing import Any

import pytest
import torch

from gspo_services.learner.weights import checksums
from gspo_services.learner.weights.checksums import PublishedChecksums
from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.shared.weights import Hash, Work, checksums_of, hash_function, merge
from tests.support.wire.snapshots import snapshot_of

HASHES: tuple[Hash, ...] = ("cpu", "cuda", "xxh3")
LAYER = "model.layers.0"
NAMES = [
    *(f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"{LAYER}.mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up", "down")),
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.1.mlp.gate_proj.weight",
]
"""The last one lacks its other half."""


def tensors(dtype: torch.dtype = torch.bfloat16, rows: int = 70) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, 256, generator=generator).to(dtype) for name in NAMES}


def stepped(weights: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for name in names:
        changed[name].view(-1)[7] += 1
        changed[name].view(-1)[-1] += 1
    return changed


def expected(snapshot: Snapshot, name: Hash) -> dict[str, str]:
    parameters = merge(zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True))
    return checksums_of(parameters, hash_function(name))


@pytest.mark.parametrize(("name", "device"), [*((name, None) for name in HASHES), ("cuda", torch.device("cpu"))])
# An odd number of bfloat16 values: parts of a merged parameter begin within a word.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_version_has_the_checksums_that_its_bytes_have(
    name: Hash, device: torch.device | None, dtype: torch.dtype
) -> None:
    weights = tensors(dtype)
    versions = [snapshot_of(1, weights.items())]
    for number, changed in enumerate(([NAMES[1]], [NAMES[5], NAMES[6], NAMES[-2]], [], NAMES), start=2):
        weights = stepped(weights, *changed)
        versions.append(snapshot_of(number, weights.items()))
    known = PublishedChecksums([name], device=device)
    base = None
    for snapshot in versions:
        known.renew(base, snapshot)
        found = known.known(snapshot.manifest.digest, name)
        assert found == expected(snapshot, name)
        assert "model.layers.1.mlp.gate_up_proj.weight" not in found
        base = snapshot


def test_only_what_changed_is_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    changed: list[int] = []

    class Counted(checksums.TileSums):
        def __init__(self, parts: Any, **options: Any) -> None:
            super().__init__(parts, **options)
            hashed.append(self.num_bytes)

        def changes(self, begin: int, old: Any, new: Any) -> list[Work]:
            changed.append(len(new))
            return super().changes(begin, old, new)

    monkeypatch.setattr(checksums, "TileSums", Counted)
    weights = tensors()
    first, second = snapshot_of(1, weights.items()), snapshot_of(2, stepped(weights, NAMES[1], NAMES[-2]).items())
    known = PublishedChecksums(["cuda"])
    known.renew(None, first)
    # One parameter for q, k and v, one for o, two for the experts, the embedding and the norm.
    assert len(hashed) == 6
    hashed.clear()
    known.renew(first, second)
    assert hashed == []
    assert changed == [70 * 256 * 2] * 2


def test_a_device_without_room_leaves_the_hash_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(checksums.DeviceChecksums):
        asked = 0

        def checksum(self, parts: Any) -> str:
            Full.asked += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(checksums, "DeviceChecksums", Full)
    known, base = PublishedChecksums(["cuda"], device=torch.device("cpu")), None
    for number in (1, 2):
        snapshot = snapshot_of(number, stepped(tensors(), NAMES[number]).items())
        known.renew(base, snapshot)
        assert known.known(snapshot.manifest.digest, "cuda") == expected(snapshot, "cuda")
        base = snapshot
    assert Full.asked == 1


def test_a_hash_is_computed_for_the_versions_after_the_first_request() -> None:
    weights = tensors()
    versions = [snapshot_of(number, stepped(weights, NAMES[number]).items()) for number in range(1, 5)]
    known = PublishedChecksums()
    known.renew(None, versions[0])
    assert known.known(versions[0].manifest.digest, "xxh3") == {}
    known.renew(versions[0], versions[1])
    assert known.known(versions[1].manifest.digest, "xxh3") == expected(versions[1], "xxh3")
    assert known.known(versions[1].manifest.digest, "cpu") == {}
    known.renew(versions[1], versions[2])
    known.renew(versions[2], versions[3])
    assert known.known(versions[1].manifest.digest, "xxh3") == {}
    assert known.known(versions[2].manifest.digest, "cpu") == expected(versions[2], "cpu")


def test_all_versions_are_hashed_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    class Noted(checksums.DeviceChecksums):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            made.append(device)

    monkeypatch.setattr(checksums, "DeviceChecksums", Noted)
    known = PublishedChecksums(["cuda"], device=torch.device("cpu"))
    for number in (1, 2, 3):
        known.renew(None, snapshot_of(number, stepped(tensors(), NAMES[number]).items()))
    assert made == [torch.device("cpu")]
