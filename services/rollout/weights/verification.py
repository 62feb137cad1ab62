"""What the comparison of an engine's parameters with the published version found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gspo_services.shared.weights import EMBEDDING, HEAD, Layout, other_towers


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of the comparison."""

    mismatched: list[str] = field(default_factory=list)
    """Engine parameters that differ from what was sent; of a server of several ranks, with the rank that has them."""
    missing: list[str] = field(default_factory=list)
    """Sent tensors without a parameter in the engine, which skipped them in silence."""
    unsent: list[str] = field(default_factory=list)
    """Engine parameters for which nothing was sent."""
    unverified: list[str] = field(default_factory=list)
    """Sent tensors that could not be compared, because other parts of their parameter were not sent."""

    @property
    def ok(self) -> bool:
        """No parameter differs, is missing or unsent; the caller still has to look at ``unverified``."""
        return not (self.mismatched or self.missing or self.unsent)


def joined(found: Sequence[Verification]) -> Verification:
    """Return one result of those of all ranks, which got the same tensors."""
    return Verification(
        mismatched=[name for each in found for name in each.mismatched],
        missing=[name for each in found for name in each.missing],
        unsent=[name for each in found for name in each.unsent],
        unverified=found[0].unverified,
    )


def tied_head(digests: Mapping[str, str]) -> bool:
    """Return whether the output layer is the tied embedding, by checksums or digests of both: some checkpoints store it
    twice, the engine once."""
    head, embedding = (next((digests[name] for name in digests if name.endswith(end)), None) for end in (HEAD, EMBEDDING))
    return head is not None and head == embedding


class HeldTowers:
    """What an engine has beside the text model that versions are of, by the digests of the first comparison: it loaded
    these towers from the starting checkpoint, and no update may change them."""

    def __init__(self) -> None:
        self._first: Sequence[Mapping[str, str]] = ()

    def checked(
        self, found: Verification, parameters: Mapping[str, Layout], reported: Sequence[Mapping[str, str]]
    ) -> Verification:
        """Return what was found, without other towers among ``unsent``, and with those that have changed.

        ``parameters``: those of the version. ``reported``: of each rank, digests of its other parameters at least.
        """
        own = [{name: each[name] for name in other_towers(parameters, each)} for each in reported]
        self._first = self._first or own
        changed = {
            name
            for before, now in zip(self._first, own, strict=False)
            for name in {*before, *now}
            if before.get(name) != now.get(name)
        }
        known = {name for each in own for name in each}
        return replace(
            found,
            mismatched=[*found.mismatched, *(f"{name} (of a tower that is not trained)" for name in sorted(changed))],
            unsent=[name for name in found.unsent if name.rpartition(": ")[2] not in known],
        )
