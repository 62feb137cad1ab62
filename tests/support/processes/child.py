"""A process for the supervisor's tests: ``python -m tests.support.processes.child NAME PIPE BEHAVIOUR...``.

It tells what it does as lines in the named pipe: "NAME started PID", "NAME stopping".

serve             until SIGTERM, then exit 0
unhandled         is ended by SIGTERM
stubborn          takes no notice of SIGTERM
exit STATUS WORDS says WORDS ("last words") on standard error and exits
crash-once FILE   dies by SIGKILL unless FILE exists, which it makes; then serves
refuse FILE ENDS  ends as the n-th of ENDS says, "9 2 6": by signal 9, or with the status; FILE counts; then serves
chatter NUMBER    logs this many lines, then serves
when-told ...     one of these after SIGUSR1; serves until then
"""

import json
import os
import signal
import sys
from pathlib import Path


def main(name: str, pipe: str, behaviour: str, *arguments: str) -> int:
    def tell(text: str) -> None:
        with open(pipe, "w") as file:
            file.write(f"{name} {text}\n")

    # Blocked and waited for, so that no signal comes too early.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    tell(f"started {os.getpid()}")
    print(f"{name} says hello", flush=True)
    if behaviour == "when-told":
        told = signal.sigwait({signal.SIGTERM, signal.SIGUSR1}) == signal.SIGUSR1
        behaviour, arguments = (arguments[0], arguments[1:]) if told else ("stop", ())
    if behaviour == "exit":
        print(arguments[1] if len(arguments) > 1 else "last words", file=sys.stderr)
        return int(arguments[0])
    if behaviour == "chatter":
        import structlog  # Only here: the others start at once.

        from gspo_services.shared.runtime.logs import configure_logging

        configure_logging(name)
        for index in range(int(arguments[0])):
            structlog.get_logger().info(f"line-{index // 100}", index=index)
        tell("has spoken")
    if behaviour == "refuse":
        starts = Path(arguments[0]).stat().st_size if Path(arguments[0]).exists() else 0
        Path(arguments[0]).write_bytes(b"x" * (starts + 1))
        ends = [int(end) for end in arguments[1].split()]
        if starts < len(ends):
            if ends[starts] == signal.SIGKILL:
                os.kill(os.getpid(), signal.SIGKILL)
            print(json.dumps({"event": "cannot_start", "error": "no such thing"}), flush=True)
            return ends[starts]
    if behaviour == "crash-once" and not Path(arguments[0]).exists():
        Path(arguments[0]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "unhandled":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.pause()
    while behaviour == "stubborn":
        signal.sigwait({signal.SIGTERM})
        tell("refuses")
    if behaviour != "stop":
        signal.sigwait({signal.SIGTERM})
    tell("stopping")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
