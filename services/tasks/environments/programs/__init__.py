"""Programs as answers: tasks with tests, and the grader that runs programs in a sandbox."""

from gspo_services.tasks.environments.programs.extraction import AnsweredProgram, program_in
from gspo_services.tasks.environments.programs.grader import ProgramGrader
from gspo_services.tasks.environments.programs.jobs import SandboxedJobs
from gspo_services.tasks.environments.programs.owners import OwnerName
from gspo_services.tasks.environments.programs.problems import (
    PACKED_TESTS_BYTES,
    CheckerProgram,
    FiledTests,
    GeneratedTests,
    Problem,
    ProgramTest,
    TaskFault,
    TestsElsewhere,
    digest_of,
    packed_tests,
    unzipped,
)
from gspo_services.tasks.environments.programs.rules import ProgramRules
from gspo_services.tasks.environments.programs.toolchains import TOOLCHAINS, Toolchain, language_of

__all__ = [
    "PACKED_TESTS_BYTES",
    "TOOLCHAINS",
    "AnsweredProgram",
    "CheckerProgram",
    "FiledTests",
    "GeneratedTests",
    "OwnerName",
    "Problem",
    "ProgramGrader",
    "ProgramRules",
    "ProgramTest",
    "SandboxedJobs",
    "TaskFault",
    "TestsElsewhere",
    "Toolchain",
    "digest_of",
    "language_of",
    "packed_tests",
    "program_in",
    "unzipped",
]
