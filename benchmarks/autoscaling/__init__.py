"""The size of the fleet under an autoscaler, simulated: `python -m benchmarks.autoscaling`; docs/evidence/autoscaling.md."""
