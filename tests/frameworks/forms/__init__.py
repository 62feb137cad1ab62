"""SDKs and frameworks in the form that their own pages show first, for workers under a Python of theirs."""
