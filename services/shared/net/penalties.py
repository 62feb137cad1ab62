"""Counts offences, which are forgiven over time, and shuts out repeat offenders. Pure."""

from collections import OrderedDict

from gspo_protocol import limits

Offender = tuple[str, bytes | str]
"""The kind of name, and the name: a channel and an identity, "key" and a key, "host" and an address."""


class Penalties:
    """Each offender may have a ``burst`` of offences, and ``per_s`` more each second. Beyond that it is shut out."""

    def __init__(self, burst: float = limits.BAD_MESSAGES_BURST, per_s: float = limits.BAD_MESSAGES_PER_S) -> None:
        self._burst = burst
        self._per_s = per_s
        self._offenders: OrderedDict[Offender, tuple[float, float]] = OrderedDict()
        self._ignored: dict[Offender, float] = {}

    @property
    def active(self) -> bool:
        return bool(self._ignored)

    def offend(self, offender: Offender, now: float) -> bool:
        """Count an offence. Returns True when ``offender`` is ignored from now on, for IGNORED_S."""
        level, since = self._offenders.pop(offender, (0.0, now))
        level = max(0.0, level - (now - since) * self._per_s) + 1
        if level > self._burst:
            self.shut_out(offender, now, limits.IGNORED_S)
            return True
        self._offenders[offender] = (level, now)
        if len(self._offenders) > limits.MAX_PEERS:
            self._offenders.popitem(last=False)
        return False

    def shut_out(self, offender: Offender, now: float, seconds: float) -> None:
        """Ignore ``offender`` for at least ``seconds``, whatever it did before."""
        self._ignored[offender] = max(now + seconds, self._ignored.pop(offender, now))
        if len(self._ignored) > limits.MAX_PEERS:
            del self._ignored[next(iter(self._ignored))]

    def ignores(self, offender: Offender, now: float) -> bool:
        until = self._ignored.get(offender)
        if until is None:
            return False
        if now < until:
            return True
        for other in [other for other, end in self._ignored.items() if end <= now]:
            del self._ignored[other]
        return False
