"""What crosses a process boundary: messages, array frames, the codec, delivery. Pure: no sockets, no clocks, no torch."""
