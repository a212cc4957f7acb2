"""Pallas kernels of jaxtp: tiles and instructions, never a mesh.

Each family has one `api` and two implementations: `mosaic` (Pallas Mosaic GPU on
Hopper) and `portable` (plain Pallas on fixed tiles).
"""

from pallas_kernels.bf16_matmul.api import bf16_matmul as bf16_matmul
from pallas_kernels.fp8_matmul.api import fp8_matmul as fp8_matmul
from pallas_kernels.implementation import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.implementation import Implementation as Implementation
from pallas_kernels.implementation import (
    resolve_implementation as resolve_implementation,
)
from pallas_kernels.nvfp4_matmul.api import nvfp4_int8_matmul as nvfp4_int8_matmul
from pallas_kernels.nvfp4_matmul.api import nvfp4_matmul as nvfp4_matmul
