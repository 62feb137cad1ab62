"""A process that speaks an older protocol version: `PATH broker|rollout ARGUMENTS`, as `gspo` has them."""

import runpy
import sys

import gspo_protocol.limits

gspo_protocol.limits.PROTOCOL_VERSION -= 1  # type: ignore[misc]
module = f"gspo_services.{sys.argv[1]}"
sys.argv[:2] = [module]
# Importing the services takes the version, so it comes last.
runpy.run_module(module, run_name="__main__", alter_sys=True)
