"""The NVFP4 "int8" program in NumPy alone: the words that every platform must give."""

import numpy as np

from jaxtp import formats, packing
from jaxtp.plan import SlotLayout
from jaxtp.weights import Nvfp4Weight


def nvfp4_int8_partials(
    x: np.ndarray, weight: Nvfp4Weight, layout: SlotLayout
) -> np.ndarray:
    """Slot partials `[S, T, N]` of the "int8" program, without the global scale.

    `acc = RN(acc + RN(d * u))`, `u = RN(s_0 * I_0 + s_1 * I_1)`, groups of 32 columns
    ascending from the slot's start.

    Args:
        x: f32 or bf16 `[T, K]`.
        weight: `[N, K]`.
        layout: The slots of K.

    Bits:
        ORDERED.
    """
    everything = slice(0, layout.num_slots), slice(0, weight.shape[0])
    code = packing.pack_value(weight, layout, *everything)
    scale = packing.pack_scale(weight, layout, *everything).astype(np.float32)
    padded = np.zeros((x.shape[0], layout.padded), np.float32)
    padded[:, : layout.size] = x.astype(np.float32)
    groups = layout.width // 32
    q, d = formats.quantize_int8(padded.reshape(-1, layout.num_slots, groups, 32))
    doubled = np.asarray(formats.unpack_nvfp4_doubled(code))
    doubled = doubled.reshape(*doubled.shape[:2], groups, 2, 16).astype(np.int32)
    halves = np.asarray(q).reshape(*q.shape[:3], 2, 16).astype(np.int32)
    half_scale = (scale * np.float32(0.5)).reshape(*scale.shape[:2], groups, 2)
    acc = np.zeros((layout.num_slots, x.shape[0], weight.shape[0]), np.float32)
    for g in range(groups):
        dots = np.einsum("tshk,snhk->hstn", halves[:, :, g], doubled[:, :, g])
        u = _scaled(half_scale, dots, g, 0) + _scaled(half_scale, dots, g, 1)
        acc = acc + np.asarray(d)[:, :, g].T[:, :, None] * u
    return acc


def _scaled(scale: np.ndarray, dots: np.ndarray, group: int, half: int) -> np.ndarray:
    return scale[:, None, :, group, half] * dots[half].astype(np.float32)
