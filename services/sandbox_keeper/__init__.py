"""The first program inside a sandbox: it runs the others, one at a time, each in namespaces and limits of its own.

Only Python's standard library, 3.10 or later, because the interpreter may be any; its modules import each other relatively.

A run sees its own processes, an empty ``/tmp``, no ``/proc``, and ``/box`` as earlier files and preparations left it. It has
no right in its namespaces, and none over the keeper, which it cannot see. Five processes: bubblewrap, the keeper, one that
makes the namespaces, the first process in them, and the program.
"""
