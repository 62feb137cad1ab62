"""The processes of a run and the ``gspo`` command, imported as ``gspo_services``. docs/code.md has the plan of the wings."""

if __name__ != "gspo_services":
    raise ImportError("import gspo_services: that is the import name of the package in the folder services")
