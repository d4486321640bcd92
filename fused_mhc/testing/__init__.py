"""What tests, benchmarks and ``fused-mhc verify`` share; the library itself never imports it.

- `inputs`: seeded tensors, and the catalogue of operations and their modes.
- `transcription`: every formula in plain differentiable torch, the fp64 oracle.
- `compare`: every tolerance and its reason.
- `verify`: every operation on every backend against the oracle.
- `timing`, `byte_counts`: how long it took, and how few bytes it could have moved.
"""
