"""A simulated fleet under an autoscaler: ``python -m benchmarks.autoscaling``; docs/evidence/autoscaling.md."""
