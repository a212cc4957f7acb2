"""Slots and segments are integers of the global matrix alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtp.errors import PlanError, PlanTypeError
from jaxtp.plan import ReductionPlan, slot_layout, slots_per_rank

WIDTHS = {1280: 160, 2880: 384, 9728: 1216, 18944: 2368, 29568: 3712, 576: 96, 80: 32}


@pytest.mark.parametrize(("k", "width"), WIDTHS.items())
def test_widths_of_eight_slots(k, width):
    assert slot_layout(k, 8).width == width


def test_trailing_slots_are_empty_and_padding_stands_at_the_end():
    layout = slot_layout(80, 8)
    bounds = [layout.bounds(g) for g in range(8)]
    assert bounds == [(0, 32), (32, 64), (64, 80)] + [(80, 80)] * 5
    assert layout.padded == 256
    assert layout.segments(3, 128) == ()


def test_segments_of_1280_columns_are_those_of_the_contract():
    layout = slot_layout(1280, 8)
    assert layout.segments(0, 128) == ((0, 128), (128, 160))
    assert layout.segments(1, 128) == ((160, 256), (256, 320))
    assert layout.max_segments(128) == 2


def test_a_plan_of_blocks_has_one_slot_for_each_scale_block():
    layout = ReductionPlan("blocks").layout(1280, 128)
    assert (layout.num_slots, layout.width) == (10, 128)
    assert all(layout.segments(g, 128) == (layout.bounds(g),) for g in range(10))


@given(st.integers(1, 40000), st.integers(1, 64), st.sampled_from([32, 64, 128, 160]))
def test_slots_and_segments_cut_the_axis_exactly_once(k, num_slots, block):
    layout = slot_layout(k, num_slots)
    assert layout.width % 32 == 0
    assert layout.padded >= k
    runs = [run for g in range(num_slots) for run in layout.segments(g, block)]
    assert [column for run in runs for column in range(*run)] == list(range(k))
    for start, stop in runs:
        assert start // block == (stop - 1) // block
        assert start % 32 == 0
    for g in range(num_slots):
        assert len(layout.segments(g, block)) <= layout.max_segments(block)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_slots": 0}, "positive integer"),
        ({"num_slots": True}, "positive integer"),
        ({"num_slots": 2.0}, "positive integer"),
        ({"num_slots": "rows"}, "positive integer"),
        ({"num_slots": 12, "order": "tree"}, "power of two"),
        ({"num_slots": "blocks", "order": "tree"}, "sequential"),
        ({"order": "random"}, "'sequential' or 'tree'"),
    ],
)
def test_a_malformed_plan_is_refused(fields, text):
    with pytest.raises(PlanError, match=text):
        ReductionPlan(**fields)


def test_blocks_exist_for_block_scaled_weights_only():
    with pytest.raises(PlanTypeError, match="E4M3"):
        ReductionPlan("blocks").layout(1280)


def test_an_axis_that_does_not_divide_the_slots_is_told_what_would():
    assert slots_per_rank(10, 5) == 2
    with pytest.raises(PlanError, match=r"got axis size 4.*\[1, 2, 5, 10\]"):
        slots_per_rank(10, 4)


def test_equal_plans_hash_alike():
    assert hash(ReductionPlan()) == hash(ReductionPlan(8, "sequential"))
    assert ReductionPlan() != ReductionPlan(8, "tree")
