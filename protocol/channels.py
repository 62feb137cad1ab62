"""The channels of the system as data: which end binds, the pattern, the direction, the bounds."""

import msgspec

from protocol import limits


class ChannelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One ROUTER/DEALER channel. High-water marks count messages per peer; ``window`` is the credit of sequenced messages.

    ``max_frame_bytes_in``: largest frame that the binding end takes; a peer that sends a larger one is disconnected.
    """

    name: str
    binds: str
    connects: tuple[str, ...]
    high_water_mark: int
    window: int
    resend_s: float
    max_frame_bytes_in: int = limits.MAX_HEADER_BYTES
    heartbeat_ms: int = 1000
    heartbeat_timeout_ms: int = 4000


WORK = ChannelSpec(
    name="work",
    binds="broker",
    connects=("rollout",),
    high_water_mark=1024,
    window=256,
    resend_s=3.0,
    max_frame_bytes_in=limits.MAX_CHUNK_FRAME_BYTES,
)
BATCH = ChannelSpec(
    name="batch",
    binds="broker",
    connects=("learner", "operator"),
    high_water_mark=64,
    window=16,
    resend_s=3.0,
)
WEIGHTS = ChannelSpec(name="weights", binds="learner", connects=("rollout",), high_water_mark=64, window=16, resend_s=3.0)
PEER_WEIGHTS = ChannelSpec(
    name="peer-weights", binds="rollout", connects=("rollout",), high_water_mark=64, window=16, resend_s=3.0
)
