"""Writes the golden frames of the protocol, only together with a new PROTOCOL_VERSION.

``python -m tests.support.wire.golden``
"""

import json
from pathlib import Path

from gspo_protocol.codec import encode, message_type
from gspo_protocol.limits import PROTOCOL_VERSION
from tests.support.builders import one_of_each

GOLDEN = Path(__file__).parents[2] / "unit" / "protocol" / "golden" / "frames.json"


def main() -> None:
    """Record every message type."""
    frames = {
        message_type(message): [bytes(frame).hex() for frame in encode(message, arrays, seq=1)]
        for message, arrays in one_of_each()
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps({"protocol_version": PROTOCOL_VERSION, "frames": frames}, indent=1) + "\n")


if __name__ == "__main__":
    main()
