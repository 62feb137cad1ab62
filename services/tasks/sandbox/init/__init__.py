"""The first program inside a sandbox: it runs the others, one at a time, each in namespaces and limits of its own.

Only Python's standard library, 3.10 or later, because the interpreter may be any; its modules import each other relatively.

A run sees its own processes, an empty ``/tmp``, no ``/proc``, and ``/sandbox`` as earlier files and preparations left it. It
has no right in its namespaces, and none over init, which it cannot see. Six processes: two of bubblewrap, init, its
spawner, the first process of the run's namespaces, and the program.

A run costs some 4 ms of a processor, most of it for memory that each process copies when it first writes to it. So nothing
is imported after init's start, and Python's own work after a fork is left out.
"""
