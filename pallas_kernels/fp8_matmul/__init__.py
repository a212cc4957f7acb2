"""Kernel family: fp8 weights."""
