"""What a reader of tool calls finds."""

from dataclasses import dataclass, field

from gspo_services.rollout.rendering.interface import ParsedCall


@dataclass
class Found:
    """Calls of one answer, and the text around them."""

    calls: list[ParsedCall] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    problem: str | None = None
    """What is wrong with the first unreadable call, whose text is outside."""

    @property
    def text(self) -> str:
        """Return the text outside of calls; whitespace between calls belongs to their format."""
        return "".join(piece for piece in self.outside if piece.strip() or not self.calls)

    def give_up(self, text: str, problem: str) -> None:
        """Leave ``text``, the rest of the answer, outside. After an unreadable call nobody knows where the next one begins:
        what looks like one may stand in an argument."""
        self.outside.append(text)
        self.problem = problem
