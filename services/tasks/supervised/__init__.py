"""Processes that may hang, crash, fork, print without end or say anything: one set of rules for all of them.

Each leads a session of its own and carries a mark, and is killed with everything that it has started. Its standard input is
a socket to its parent (``worker/frames.py`` is the other end): when the parent ends, however, the process ends, too.
"""

from gspo_services.tasks.supervised.blocking import BlockingProcess
from gspo_services.tasks.supervised.messages import BadMessage, read_frame
from gspo_services.tasks.supervised.process import SupervisedProcess

__all__ = ["BadMessage", "BlockingProcess", "SupervisedProcess", "read_frame"]
