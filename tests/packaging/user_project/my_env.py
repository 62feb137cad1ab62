"""An environment of the user that imports the user's other packages."""

from services.tasks import Words

import protocol
import tests

assert all("user" in (package.__doc__ or "") for package in (protocol, tests))


class MyEnv(Words):
    """The same words."""
