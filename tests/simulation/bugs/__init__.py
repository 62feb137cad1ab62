"""All bugs that the audit must find."""

from tests.simulation.bugs.agents import AGENTS
from tests.simulation.bugs.delivery import DELIVERY
from tests.simulation.bugs.groups import GROUPS
from tests.simulation.bugs.hostile import HOSTILE
from tests.simulation.bugs.parts import PARTS
from tests.simulation.bugs.planting import Bug, planted
from tests.simulation.bugs.poison import POISON
from tests.simulation.bugs.sampling import SAMPLING
from tests.simulation.bugs.storage import STORAGE
from tests.simulation.bugs.training import TRAINING

__all__ = ["BUGS", "Bug", "planted"]

BUGS = (*DELIVERY, *TRAINING, *POISON, *STORAGE, *HOSTILE, *AGENTS, *SAMPLING, *PARTS, *GROUPS)
