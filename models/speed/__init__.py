"""Faster passes: CPU kernels, rounded weights, joined layers, CUDA graphs."""
