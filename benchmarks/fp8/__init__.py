"""The demo with an engine that computes in FP8, emulated on a CPU: python -m benchmarks.fp8"""
