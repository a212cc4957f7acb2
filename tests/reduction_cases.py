"""Partials, plans and the sums of NumPy, for the tests of reduction."""

import numpy as np
import pytest
from ranks import on_ranks

from jaxtp.plan import ReductionPlan
from jaxtp.reduction import ordered_sum
from jaxtp.testing import assert_same_words, count_different_words

SEQUENTIAL = ReductionPlan(8, "sequential")
TREE = ReductionPlan(8, "tree")
# Plan and schedule of every program that `ordered_sum` can run on eight slots.
PROGRAMS = [
    pytest.param(SEQUENTIAL, "exchange", id="exchange"),
    pytest.param(SEQUENTIAL, "chain", id="chain"),
    pytest.param(SEQUENTIAL, None, id="default"),
    pytest.param(TREE, None, id="tree"),
]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sequential_in_numpy(partials):
    total = np.zeros(partials.shape[1:], np.float32)
    for partial in partials:
        total = np.add(total, partial, dtype=np.float32)
    return total


def tree_in_numpy(partials):
    level = list(partials)
    while len(level) > 1:
        pairs = zip(level[0::2], level[1::2], strict=True)
        level = [np.add(a, b, dtype=np.float32) for a, b in pairs]
    return level[0]


def in_numpy(partials, plan):
    with np.errstate(invalid="ignore"):
        if plan.order == "tree":
            return tree_in_numpy(partials)
        return sequential_in_numpy(partials)


def split(partials, tp):
    """The slots as ranks hold them, `[tp, S/tp, *shape]`."""
    return partials.reshape(tp, len(partials) // tp, *partials.shape[1:])


def reduced(partials, tp, plan, schedule=None, mesh=None):
    """The results of all ranks, `[tp, *shape]`."""
    f = lambda local: ordered_sum(local, "tp", plan, schedule)
    return on_ranks(f, split(partials, tp), mesh=mesh)


def assert_every_rank_has(actual, expected, what):
    for rank, words in enumerate(actual):
        assert_same_words(words, expected, f"{what}, rank {rank} of {len(actual)}")


def share_of_different_words(actual, expected):
    return count_different_words(actual, expected) / expected.size
