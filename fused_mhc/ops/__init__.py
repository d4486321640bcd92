"""The operations, a folder each: contract, reference, kernels, tuning."""
