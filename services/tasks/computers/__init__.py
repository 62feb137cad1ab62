"""The computers of agents' episodes: files that are kept here, and a sandbox for each command."""

from gspo_services.tasks.computers.computer import ComputerAnswer, ComputerOptions, ComputerRequest, EpisodeComputer
from gspo_services.tasks.computers.files import BadChange
from gspo_services.tasks.computers.records import answer_in, loses_files

__all__ = [
    "BadChange",
    "ComputerAnswer",
    "ComputerOptions",
    "ComputerRequest",
    "EpisodeComputer",
    "answer_in",
    "loses_files",
]
