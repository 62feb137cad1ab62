"""A simulated fleet under an autoscaler: ``python -m benchmarks.autoscaling``; docs/guide/autoscaling.md."""
