"""Which tensors of a checkpoint every device holds whole, told by their names."""

WHOLE = ("embed_tokens", "embedding", "word_embeddings", "wte", "router", "gate")
"""Modules that are looked up or are too small to cut. `gate` is a router's name;
`gate_proj` is a projection."""


def stays_whole(name: str) -> bool:
    """Whether a weight's module is one of `WHOLE`.

    Args:
        name: Name of the weight, `model.layers.1.moe.gate.weight`.
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    return module in WHOLE
