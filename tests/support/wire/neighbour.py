"""A peer of a neighbouring release, as far as a handshake goes: what it says, and what it can read.

No such release is recorded. It differs from this one in its version, and it knows the fields below, which no release takes
away.
"""

from typing import Any, Final

import msgpack

from gspo_protocol.limits import PROTOCOL_VERSION

OLDER: Final = PROTOCOL_VERSION - 1
NEWER: Final = PROTOCOL_VERSION + 1
_NONE: Final = type(None)
KNOWN: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "hello": {
        "protocol_version": (int,), "role": (str,), "peer": (str,), "session": (str,), "first_seq": (int,),
        "fingerprint": (str,), "commit": (list, _NONE),
    },
    "welcome": {
        "protocol_version": (int,), "run_id": (str,), "policy_version": (int,), "trained_batches": (int,),
        "weights_digest": (str,), "weights_endpoint": (str,), "next_batch": (int,), "fingerprint": (str,), "session": (str,),
        "broker": (int,), "num_brokers": (int,), "commit": (list, _NONE), "begun_on": (str,),
    },
    "refused": {
        "reason": (str,), "message_type": (str,), "fatal": (bool,), "retry_s": (float,), "session": (str,),
        "protocol_version": (int, _NONE),
    },
}  # fmt: skip
"""The types of the fields of the handshake's messages."""


def said(kind: str, **fields: Any) -> list[bytes]:
    """A message of the handshake as a neighbouring release encodes it."""
    return [msgpack.packb({"m": {"type": kind, **fields}, "s": None, "a": []})]


def hello(role: str, peer: str, version: int = OLDER, **more: Any) -> list[bytes]:
    """Its Hello. ``more``: fields that only it has."""
    known = {"protocol_version": version, "role": role, "peer": peer, "session": "s"}
    known |= {"first_seq": 0, "fingerprint": "", "commit": None}
    assert set(known) == set(KNOWN["hello"])
    return said("hello", **known, **more)


def read(frames: list[bytes]) -> dict[str, Any]:
    """What it understands of an answer; it ignores other fields. Raises: AssertionError for one that it cannot read."""
    (frame,) = frames
    header = msgpack.unpackb(frame)
    assert set(header) == {"m", "s", "a"}
    known = KNOWN[header["m"]["type"]]
    fields = {name: value for name, value in header["m"].items() if name in known}
    assert set(fields) == set(known), f"fields that a neighbouring release misses: {set(known) - set(fields)}"
    for name, value in fields.items():
        assert type(value) in known[name], f"{name} is {value!r}"
    return {"type": header["m"]["type"], **fields}
