"""``python -P -m gspo_services.tasks.reward_worker MEMORY_BYTES CPU_SECONDS NETWORK FILE_BYTES``: see ``worker``."""

import sys

from gspo_services.tasks.reward_worker.worker import main

if __name__ == "__main__":
    main(
        memory_bytes=int(sys.argv[1]), cpu_s=int(sys.argv[2]), network=sys.argv[3] == "network", file_bytes=int(sys.argv[4])
    )
