"""What the comparison of an engine's parameters with the published version found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gspo_services.shared.weights import EMBEDDING, HEAD


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
    return HEAD in digests and digests[HEAD] == digests.get(EMBEDDING)
