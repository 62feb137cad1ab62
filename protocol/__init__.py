"""What crosses a process boundary: messages, array frames, the codec, delivery. Pure: no sockets, no clocks, no torch."""

if __name__ != "gspo_protocol":
    raise ImportError("import gspo_protocol: that is the import name of the package in the folder protocol")
