"""One learner at a time: the broker welcomes another only when the run's learner has left or was silent for long."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable

from gspo_protocol.messages import Ack, AnyMessage, Batch, BatchPart, Goodbye, Hello, Message, Refused, Welcome
from gspo_services.broker.ledger.fencing import LEARNER_LEASE_S, LISTENING_S
from tests.simulation.audit.books import Books, Rules, Violation

ONE_LEARNER = "one learner"
LEFT_S = float("inf")
QUEUED_S = LISTENING_S
"""The longest that a Hello may wait in the broker's queue behind a commit; that time counts as silence, too."""


class LearnerAudit(Books):
    """Knows when each learner was heard. A broker that did not listen meanwhile makes a silence longer, never shorter."""

    def __init__(self, rules: Rules, happened: Counter[str], report: Callable[[Violation], None]) -> None:
        super().__init__(rules, happened, report)
        self._learners: dict[str, float] = {}
        """By session: when a broker heard it last."""
        self._asked: defaultdict[str, deque[tuple[str | None, float]]] = defaultdict(deque)
        """By session: for each unanswered Hello, the session that had the run, and how long that had been silent."""
        self._rollouts: dict[str, str] = {}
        self._left: set[str] = set()
        """Sessions whose Goodbye was read, perhaps in one round with the Hello before it: the Welcome comes after both."""

    def _hear(self, peer: bytes, message: AnyMessage) -> None:
        if isinstance(message, Hello):
            if message.role == "learner":
                silent_s = LEFT_S if self.holder is None else self.now() - self._learners[self.holder]
                self._asked[message.session].append((self.holder, silent_s))
                self._learners[message.session] = self.now()
            elif message.role == "rollout":
                former = self._rollouts.get(message.peer, message.session)
                self._rollouts[message.peer] = message.session
                self.superseded |= {former} - {message.session}
            return
        session = self.sessions.get(peer, "")
        if session in self._learners:
            self._learners[session] = self.now()
            if isinstance(message, Goodbye):
                self._left.add(session)
                self.holder = None if self.holder == session else self.holder

    def _answer(self, peer: bytes, message: Message) -> None:
        session = message.session if isinstance(message, Ack) else self.sessions.get(peer, "")
        if session not in self._learners:
            return
        asked = self._asked[session]
        match message:
            case Refused(message_type="hello", fatal=False):
                self.happened["second learner turned away"] += 1
                if asked:
                    asked.popleft()
            case Welcome() if session != self.holder:
                self._welcome(session, max((silent_s for holder, silent_s in asked if holder == self.holder), default=0.0))
                asked.clear()
            case Batch() | BatchPart() | Ack():
                self.require(
                    self.holder in (session, None),
                    ONE_LEARNER,
                    lambda: f"{session} gets {type(message).__name__}, but {self.holder} has the run",
                )
            case _:
                pass

    def _welcome(self, session: str, silent_s: float) -> None:
        former = self.holder
        self.require(
            former is None or silent_s >= LEARNER_LEASE_S - QUEUED_S,
            ONE_LEARNER,
            lambda: f"{session} is welcomed, but {former}, which has the run, was heard {silent_s:.3f} s before it asked",
        )
        if former is not None:
            self.superseded.add(former)
            self.happened["learner took over"] += int(former.split(".")[0] != session.split(".")[0])
        self.holder = None if session in self._left else session
        self.num_learner_lives += 1
        self.passes("welcomed")
