"""A small checkpoint in the manner of Step: experts of width 1280, hidden size 576."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from jaxtp import checkpoint

Layout = Literal["bf16", "step_fp8", "step_nvfp4"]
LAYOUTS: dict[str, Layout] = {
    "bf16": "bf16",
    "e4m3": "step_fp8",
    "nvfp4": "step_nvfp4",
}
"""The checkpoint layout that each weight format is written in."""

HIDDEN = 576
HEADS_WIDTH = 1280
EXPERT_WIDTH = 1280
EXPERTS = 2

SHAPES: dict[str, tuple[int, ...]] = {
    "model.layers.1.self_attn.o_proj.weight": (HIDDEN, HEADS_WIDTH),
    "model.layers.1.moe.gate_proj.weight": (EXPERTS, EXPERT_WIDTH, HIDDEN),
    "model.layers.1.moe.up_proj.weight": (EXPERTS, EXPERT_WIDTH, HIDDEN),
    "model.layers.1.moe.down_proj.weight": (EXPERTS, HIDDEN, EXPERT_WIDTH),
}
"""Matrices `[N, K]` and banks `[E, N, K]`.

K = 1280 makes slots of 160 columns, which cut scale blocks of 128; K = 576 leaves two
slots empty, and 576 rows end in half a block. There are two shapes only, because
compiling is what a sweep spends its time on.
"""


def write(folder: Path, formats: Sequence[str], seed: int) -> dict[str, Path]:
    """Writes the same random matrices once in each format.

    Args:
        folder: Where one subfolder a format is made.
        formats: Keys of `LAYOUTS`.
        seed: Of the random values.

    Returns:
        The checkpoint folder of each format.
    """
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in SHAPES.items()
    }
    tensors["model.norm.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
    config = {
        "model_type": "step3p5",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": EXPERT_WIDTH,
        "moe_num_experts": EXPERTS,
    }
    paths = {format: folder / LAYOUTS[format] for format in formats}
    for format, path in paths.items():
        checkpoint.save(path, tensors, layout=LAYOUTS[format], config=config)
    return paths
