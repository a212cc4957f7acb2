"""Tensor-parallel projections for JAX, with the same words on every mesh."""
