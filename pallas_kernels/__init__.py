"""Pallas kernels of jaxtp: tiles and instructions, never a mesh."""
