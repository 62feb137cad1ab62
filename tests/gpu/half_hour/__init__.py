"""What only a GPU can show, in half an hour on one: ``python -m tests.gpu.half_hour --out DIR`` writes one report.

The steps come in the order of their worth, each in a process of its own with a time limit; what is missing is named and the
next step runs. ``python -m tests.gpu.half_hour.pack DIR`` packs what a machine without a package index lacks.
"""
