"""The channels of the system as data: which end binds, the pattern, the direction, the bounds."""

from collections.abc import Sequence

import msgspec

from gspo_protocol import limits
from gspo_protocol.errors import ProtocolError


class ChannelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One ROUTER/DEALER channel.

    ``high_water_mark``: messages to one peer that wait to be sent. ``window`` and ``limits.WINDOW_BYTES`` are the credit of
    sequenced messages. ``max_frame_bytes_in``: largest frame that the binding end takes; a peer that sends a larger one is
    disconnected. ``max_message_bytes_in``: the same for all frames of a message together.
    """

    name: str
    binds: str
    connects: tuple[str, ...]
    high_water_mark: int
    window: int
    resend_s: float
    max_frame_bytes_in: int = limits.MAX_HEADER_BYTES
    max_message_bytes_in: int = limits.MAX_HEADER_BYTES

    @property
    def max_waiting_bytes(self) -> int:
        """Bytes of one peer's messages that wait to be handled: its window, and the message that reached its end."""
        return limits.WINDOW_BYTES + self.max_message_bytes_in

    def require_taken(self, message_type: str, sizes: Sequence[int]) -> None:
        """Check the sizes of a message's frames. Raises: ProtocolError when the binding end does not take them: it would
        break the connection, and its peer would send the same message over each new one.
        """
        for what, found, allowed in (
            ("a frame has", max(sizes), self.max_frame_bytes_in),
            ("all frames have", sum(sizes), self.max_message_bytes_in),
        ):
            if found > allowed:
                raise ProtocolError(
                    f"{message_type}: {what} {found} bytes, the {self.binds} takes {allowed} on the {self.name} channel"
                )


WORK = ChannelSpec(
    name="work",
    binds="broker",
    connects=("rollout",),
    high_water_mark=1024,
    window=256,
    resend_s=3.0,
    max_frame_bytes_in=limits.MAX_CHUNK_FRAME_BYTES,
    # Token ids, log-probs and experts.
    max_message_bytes_in=limits.MAX_HEADER_BYTES + 3 * limits.MAX_CHUNK_FRAME_BYTES,
)
BATCH = ChannelSpec(
    name="batch",
    binds="broker",
    connects=("learner", "operator"),
    high_water_mark=64,
    window=16,
    resend_s=3.0,
)
WEIGHTS = ChannelSpec(
    name="weights",
    binds="learner",
    # Rank 0 asks the other ranks for their parts.
    connects=("rollout", "learner"),
    high_water_mark=64,
    window=16,
    resend_s=3.0,
)
PEER_WEIGHTS = ChannelSpec(
    name="peer-weights", binds="rollout", connects=("rollout",), high_water_mark=64, window=16, resend_s=3.0
)
