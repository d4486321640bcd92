"""Kernels compiled on a machine without the GPU that will run them."""
