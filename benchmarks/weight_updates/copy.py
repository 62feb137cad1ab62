"""What a version costs a rollout's process, from the arrived delta to the moment in which the engine can be told to load.

Three ways, on the same versions, beside a plain fetch of the same bytes, which all of them need:

all     without a look at the changes: every changed tensor hashed, the engine's checksums computed from all tensors, and all
        changed tensors written to a file
files   the copy is patched, its changes are checked, and the engine gets links to it: it then loads all of it
patch   as files, and the changes are written for an engine that patches its parameters

Bytes are counted where they are read or written in bulk. CPU seconds are those of all threads of this process.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest import mock

import torch

from benchmarks.weight_updates.versions import must, step
from gspo_protocol.digests import tensor_digest
from gspo_services.learner.weights import encode_delta
from gspo_services.learner.weights.snapshot import Delta, Snapshot
from gspo_services.rollout.weights import replica as replicas
from gspo_services.rollout.weights.file import header_of
from gspo_services.rollout.weights.files import WeightFiles
from gspo_services.rollout.weights.patch import write_patch
from gspo_services.rollout.weights.replica import Replica
from gspo_services.shared.weights import ONE_RANK, Hash, checksums_of, hash_function, layouts, merge, shards
from tests.support.wire.replicas import hold
from tests.support.wire.snapshots import snapshot_of

LAYERS: Final = 8
HIDDEN: Final = 768
EXPERTS: Final = 32
EXPERT_WIDTH: Final = 256
VERSIONS: Final = 5
CHANGED: Final = 0.01
HASHES: Final[tuple[Hash, ...]] = ("cuda", "xxh3")


class Counted:
    """Bytes read and written in bulk."""

    def __init__(self) -> None:
        self.read = 0
        self.written = 0

    def counting(self, function: Callable[..., Any], read: Callable[..., int], written: Callable[..., int]) -> Any:
        """Return ``function``, counted; ``read`` and ``written`` get its result and its arguments."""

        def counted(*arguments: Any) -> Any:
            result = function(*arguments)
            self.read += read(result, *arguments)
            self.written += written(result, *arguments)
            return result

        return counted


def tensors(num_layers: int) -> dict[str, torch.Tensor]:
    """Random bfloat16 weights of a mixture of experts, by the names of a checkpoint: 39 MiB for each layer."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (2048, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for part, rows in (("q", HIDDEN), ("k", HIDDEN // 4), ("v", HIDDEN // 4), ("o", HIDDEN)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{prefix}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for part in ("gate", "up"):
                shapes[f"{prefix}.mlp.experts.{expert}.{part}_proj.weight"] = (EXPERT_WIDTH, HIDDEN)
            shapes[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, EXPERT_WIDTH)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def copy(num_layers: int = LAYERS, num_versions: int = VERSIONS) -> list[dict[str, Any]]:
    """Return a row for each way and hash of the engine: medians over the versions."""
    weights = tensors(num_layers)
    first = snapshot_of(1, weights.items())
    steps: list[tuple[Snapshot, Delta]] = []
    for version in range(2, 2 + num_versions):
        step(list(weights.values()), CHANGED, seed=version)
        newest = steps[-1][0] if steps else first
        snapshot = snapshot_of(version, weights.items())
        steps.append((snapshot, must(encode_delta(newest, snapshot))))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gspo-weight-copy-", dir="/dev/shm") as directory:
        for name in HASHES:
            rows.append(_measure(f"all, checksums by {name}", first, steps, Path(directory), partial(_all, name)))
        rows.append(_measure("files", first, steps, Path(directory), _files))
        rows.append(_measure("patch", first, steps, Path(directory), _patch))
    before = {"bytes": rows[0]["bytes, of the version"], "cuda": rows[0]["CPU s"], "xxh3": rows[1]["CPU s"]}
    for row in rows[2:]:
        row["bytes, of all"] = round(row["bytes, of the version"] / before["bytes"], 3)
        row |= {f"CPU, of all by {name}": round(row["CPU s"] / before[name], 3) for name in HASHES}
    return [{head: row.get(head, "") for head in rows[-1]} for row in rows]


def _measure(
    way: str, first: Snapshot, steps: list[tuple[Snapshot, Delta]], directory: Path, follow: Callable[..., None]
) -> dict[str, Any]:
    place = directory / "copy"
    replica = hold(Replica(place), first)
    replica.was_loaded()
    times, counts = [], []
    for _, delta in steps:
        payload = delta.data.tobytes()
        loads = directory / "loads"
        with _counted() as counted:
            begin = time.process_time()
            follow(replica, delta, payload, loads, counted)
            times.append(time.process_time() - begin)
        counts.append(counted)
        replica.was_loaded()
        shutil.rmtree(loads)
    content = b"".join(data for _, data in replica.tensors())
    if content != steps[-1][0].read(0, len(content)).tobytes():
        raise RuntimeError(f"{way}: the copy is not the last version")
    replica.forget()
    size = first.manifest.num_bytes
    read, written = (median(getattr(each, kind) for each in counts) for kind in ("read", "written"))
    return {
        "way": way,
        "model MiB": round(size / 2**20),
        "read, of the version": round(read / size, 3),
        "written, of the version": round(written / size, 3),
        "bytes, of the version": round((read + written) / size, 3),
        "CPU s": round(median(times), 3),
    }


def _apply(replica: Replica, delta: Delta, payload: bytes) -> None:
    replica.apply(delta.manifest, payload)


def _all(name: Hash, replica: Replica, delta: Delta, payload: bytes, loads: Path, counted: Counted) -> None:
    """Without the digests of changes, which this way does not need: their time is in this figure too, some 1 % of it."""
    with mock.patch.object(replicas, "ROLLING_SHARE", 0):
        _apply(replica, delta, payload)
    for index in replica.unloaded():
        data = replica.files.tensor(index)
        if tensor_digest(data) != replica.current.tensors[index].digest:
            raise RuntimeError("the copy is damaged")
        counted.read += len(data)
    checksums_of(merge(replica.tensors()), hash_function(name))
    counted.read += replica.files.num_bytes
    loads.mkdir()
    chosen = [replica.current.tensors[index] for index in replica.unloaded()]
    with (loads / "model.safetensors").open("wb") as file:
        file.write(header_of(chosen))
        for index in replica.unloaded():
            file.write(replica.files.tensor(index))
    counted.read += sum(info.num_bytes for info in chosen)
    counted.written += sum(info.num_bytes for info in chosen)


def _files(replica: Replica, delta: Delta, payload: bytes, loads: Path, _: Counted) -> None:
    _apply(replica, delta, payload)
    loads.mkdir()
    replica.files.link(loads, replica.unloaded())


def _patch(replica: Replica, delta: Delta, payload: bytes, loads: Path, counted: Counted) -> None:
    _apply(replica, delta, payload)
    if replica.touched is None:
        raise RuntimeError("too much has changed for a patch")
    tensors = replica.current.tensors
    # The engine has said which parameters it has.
    known, ranks = layouts(tensors), shards(tensors, ONE_RANK, 1)
    counted.written += write_patch(loads, replica.files, tensors, replica.touched, known, ranks)


@contextmanager
def _counted() -> Iterator[Counted]:
    """Count what is decompressed, hashed, gathered, scattered, and marked."""
    counted = Counted()
    unpack = replicas.decompress  # type: ignore[attr-defined]  # what the replica calls
    decompress = counted.counting(unpack, lambda out, frame, _: len(frame) + len(out), lambda out, *_: len(out))
    digest = counted.counting(tensor_digest, lambda _, data: len(data), lambda *_: 0)
    gather = counted.counting(WeightFiles.gather, lambda out, *on: out.nbytes + on[-1].nbytes, lambda out, *_: out.nbytes)
    scatter = counted.counting(
        WeightFiles.scatter, lambda _, *on: on[-1].nbytes + on[-2].nbytes, lambda _, *on: on[-1].nbytes
    )
    with (
        mock.patch.object(replicas, "decompress", decompress),
        mock.patch.object(replicas, "tensor_digest", digest),
        mock.patch.object(WeightFiles, "gather", gather),
        mock.patch.object(WeightFiles, "scatter", scatter),
        mock.patch.object(Replica, "_mark", counted.counting(Replica._mark, lambda *_: 0, _mark_bytes)),
    ):
        yield counted


def _mark_bytes(_: Any, replica: Replica) -> int:
    assert replica._directory is not None
    return os.stat(replica._directory / "version.msgpack").st_size
