"""A pretrained model from the package index: `make test-real`."""
