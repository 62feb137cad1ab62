"""A peer of the previous release, as far as a handshake goes: what it says, and what it can read. From what it recorded."""

import json
from pathlib import Path
from typing import Any, Final

import msgpack

_RECORDED: Final = json.loads((Path(__file__).parents[2] / "unit" / "protocol" / "golden" / "previous.json").read_text())
PREVIOUS: Final = int(_RECORDED["protocol_version"])
REFUSALS: Final[dict[str, str]] = _RECORDED["refusals"]
"""What its broker and its learner say to a rollout of the next protocol version."""


def recorded(kind: str) -> dict[str, Any]:
    """The previous release's header of a message of the handshake."""
    return dict(msgpack.unpackb(bytes.fromhex(_RECORDED["frames"][kind])))


def hello(role: str, peer: str) -> list[bytes]:
    """The previous release's Hello."""
    header = recorded("hello")
    fields = {"protocol_version": PREVIOUS, "role": role, "peer": peer, "session": "s", "first_seq": 0, "fingerprint": ""}
    assert set(fields) | {"type"} == set(header["m"])
    return [msgpack.packb({**header, "s": None, "m": {**header["m"], **fields}})]


def read(frames: list[bytes]) -> dict[str, Any]:
    """The fields of an answer that the previous release knows; it ignores others. Raises: AssertionError for an answer that
    it does not understand."""
    header = msgpack.unpackb(frames[0])
    known = recorded(header["m"]["type"])
    fields = {name: value for name, value in header["m"].items() if name in known["m"]}
    assert (set(header), len(frames)) == (set(known), 1)
    assert set(fields) == set(known["m"]), f"fields that the previous release misses: {set(known['m']) - set(fields)}"
    assert all(type(fields[name]) is type(known["m"][name]) for name in fields)
    return fields
