"""What tests and benchmarks of the page need."""
