"""The one error type of the wire boundary."""


class ProtocolError(ValueError):
    """A frame, message or sequence of messages that the protocol does not allow.

    The text names the message type, the field, the value and the limit, so that it can be sent back to the peer as it is.
    """

    message_type: str = ""
    """The type that the message claims, where it could be read."""
    seq: int | None = None
    """The message's sequence number, where it could be read: the sender keeps the message until it is answered."""
