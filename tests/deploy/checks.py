"""What every overlay must pass."""

from tests.deploy import pods, program, references, schemas
from tests.deploy.cluster import Check

CHECKS: dict[str, Check] = {
    check.__name__: check for module in (schemas, references, pods, program) for check in module.CHECKS
}
