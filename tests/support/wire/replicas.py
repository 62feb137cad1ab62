"""What a rollout's replica holds, and one that holds a version."""

from gspo_protocol.messages import Manifest
from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.rollout.weights.files import WeightFiles
from gspo_services.rollout.weights.replica import Replica
from tests.support.wire.snapshots import bytes_of


def hold(replica: Replica, snapshot: Snapshot) -> Replica:
    """Give ``replica`` a version."""
    return hold_bytes(replica, snapshot.manifest, bytes_of(snapshot))


def hold_bytes(replica: Replica, manifest: Manifest, data: bytes) -> Replica:
    """Give ``replica`` these bytes as a version."""
    landing = replica.landing(manifest)
    assert isinstance(landing, WeightFiles)
    landing.put(0, memoryview(data))
    replica.replace(manifest, landing)
    return replica


def content(replica: Replica) -> bytes:
    """The bytes of the version that ``replica`` holds; none if it is empty."""
    return b"" if replica.manifest is None else b"".join(data for _, data in replica.tensors())


def flip(replica: Replica, place: int) -> None:
    """Change a bit of the byte at ``place`` of the version."""
    replica.files.read(place, place + 1)[0] ^= 1
