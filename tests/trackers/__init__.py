"""Each tracker's own client and files, in an environment of their own: `make test-trackers`."""
