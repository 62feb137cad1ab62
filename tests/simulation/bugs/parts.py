"""Bugs in how a batch travels in parts."""

from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import Event

DAMAGE = (Event(at=0.0, kind="corrupt", target=("broker",), seconds=60.0, amount=0.3),)
TWICE = (Event(at=0.0, kind="duplication", seconds=60.0, amount=0.5),)

PARTS = (
    Bug(
        name="a part's digest is not checked",
        module="gspo_services.learner.broker.parts",
        old='return "" if digest == part.digest else',
        new='return "" if digest else',
        invariants=("G1 nothing acknowledged is lost", "G4", "no process ends by itself", "no error is lost"),
        weather=DAMAGE,
        seed=1,
        part_tokens=4,
    ),
    Bug(
        name="a part that comes twice is taken twice",
        module="gspo_services.learner.broker.parts",
        old="part.part != self._next or",
        new="part.part > self._next or",
        invariants=("no process ends by itself", "no error is lost", "G1"),
        weather=TWICE,
        part_tokens=4,
    ),
    Bug(
        name="a part that is lost is never asked for again",
        module="gspo_services.learner.broker.parts",
        old="        self._asked = self._next\n",
        new="        return\n",
        invariants=("liveness",),
        weather=(Event(at=0.0, kind="loss", seconds=30.0, amount=0.2),),
        seed=3,
        part_tokens=4,
    ),
    Bug(
        name="a part begins where the one before has not ended",
        module="gspo_services.broker.sending.batches",
        old="low, high = max(begin - chunk.start, 0), min(",
        new="low, high = 0, min(",
        invariants=("no process ends by itself", "no error is lost", "G1", "poison"),
        part_tokens=4,
    ),
)
