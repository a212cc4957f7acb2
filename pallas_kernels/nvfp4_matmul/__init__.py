"""Kernel family: nvfp4 weights."""
