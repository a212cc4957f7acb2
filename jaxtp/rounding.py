"""Rounded words: products that no compiler may contract into a later addition."""

from pallas_kernels.rounding import positive_zero as positive_zero
from pallas_kernels.rounding import rounded as rounded
from pallas_kernels.rounding import runtime_zero as runtime_zero
