"""Kernel family: bf16 weights."""
