"""An agent's module that takes longer to import than a worker may."""

import time

time.sleep(60)
