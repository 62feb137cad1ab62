"""An environment of the user that imports the user's other packages."""

import protocol
import tests
from services.tasks import Words

assert all("user" in (package.__doc__ or "") for package in (protocol, tests))


class MyEnv(Words):
    """The same words."""
