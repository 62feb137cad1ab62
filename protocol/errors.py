"""The one error type of the wire boundary."""


class ProtocolError(ValueError):
    """A frame, message or sequence of messages that the protocol does not allow.

    The text names the message type, the field, the value and the limit, so that it can be sent back to the peer as it is.
    """

    message_type: str = ""
    """What type the message said it has, where that much could be read."""
    seq: int | None = None
    """The sequence number that it carried, where that much could be read: its sender keeps it until it is answered."""
