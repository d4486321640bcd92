"""The project's own measurements; ``python -m benchmarks`` (``make bench-gpu``) runs them and writes the results."""
