"""Moves between ranks: every byte arrives where it should, and nothing is added."""

import inspect
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from ranks import make_axis, mapped, on_ranks, permuted_devices

from jaxtp import transport
from jaxtp.errors import MeshError, ShapeError
from jaxtp.testing import assert_same_words, count_different_words

DTYPES = [
    np.float32,
    ml_dtypes.bfloat16,
    np.float16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    np.uint8,
    np.int32,
]
SPECIAL_WORDS = [0x80000000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFF800000, 0x00000001]


def random_bytes(shape, dtype, seed=0):
    """All bit patterns of the dtype, NaN payloads, subnormals and -0 among them."""
    size = np.dtype(dtype).itemsize
    word = np.dtype(f"u{size}")
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2 ** (8 * size), shape, dtype=np.uint64).astype(word)
    # The special words' upper bytes are special in every narrower float too.
    special = [w >> (32 - 8 * size) for w in SPECIAL_WORDS]
    words.reshape(shape[0], -1)[:, : len(special)] = special
    return words.view(dtype).reshape(shape)


def assert_same_bytes(actual, expected, what):
    expected = np.ascontiguousarray(expected)
    assert actual.dtype == expected.dtype, what
    word = f"u{expected.dtype.itemsize}"
    assert_same_words(
        np.ascontiguousarray(actual).view(word), expected.view(word), what
    )


def every_move(x, blocks, tp):
    """All functions of the module on one rank, by name."""
    root = tp // 2
    moves = {
        "gather axis 0": transport.ring_all_gather(x, "tp"),
        "gather axis -1": transport.ring_all_gather(x, "tp", axis=-1),
        "gather stacked": transport.ring_all_gather(x, "tp", axis=1, tiled=False),
        "gather to root": transport.gather_to(x, "tp", root),
        "broadcast": transport.broadcast_from(x, "tp", root),
        "broadcast default": transport.broadcast_from(x, "tp"),
        "scatter": transport.scatter_from(blocks, "tp", root),
        "shift": transport.shift(x, "tp"),
        "shift back": transport.shift(x, "tp", -tp - 1),
        "all to all": transport.all_to_all_chunks(blocks, "tp"),
    }
    for distance in (1, 2, 4):
        if tp % (2 * distance) == 0:
            moves[f"exchange {distance}"] = transport.exchange(x, "tp", distance)
    for step in range(tp - 1):
        moves[f"chain {step}"] = transport.chain_step(x, "tp", step)
    return moves


def every_move_in_numpy(x, blocks):
    """The definition of each move on arrays stacked by rank."""
    tp = len(x)
    root, ranks = tp // 2, np.arange(tp)
    to_root = np.zeros((tp, *x.shape), x.dtype)
    to_root[root] = x
    moves = {
        "gather axis 0": np.stack([np.concatenate(list(x), 0)] * tp),
        "gather axis -1": np.stack([np.concatenate(list(x), -1)] * tp),
        "gather stacked": np.stack([np.stack(list(x), 1)] * tp),
        "gather to root": to_root,
        "broadcast": x[np.full(tp, root)],
        "broadcast default": x[np.zeros(tp, int)],
        "scatter": blocks[root],
        "shift": x[(ranks - 1) % tp],
        "shift back": x[(ranks + 1) % tp],
        "all to all": np.swapaxes(blocks, 0, 1),
    }
    for distance in (1, 2, 4):
        if tp % (2 * distance) == 0:
            moves[f"exchange {distance}"] = x[ranks ^ distance]
    for step in range(tp - 1):
        kept = x.copy()
        kept[step + 1] = x[step]
        moves[f"chain {step}"] = kept
    return moves


def assert_every_move(tp, dtype, mesh):
    x = random_bytes((tp, 6, 4), dtype)
    blocks = random_bytes((tp, tp, 3, 2), dtype, seed=1)
    actual = on_ranks(lambda a, b: every_move(a, b, tp), x, blocks, mesh=mesh)
    expected = every_move_in_numpy(x, blocks)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bytes(actual[name], value, f"{name}, tp={tp}, {np.dtype(dtype)}")


@pytest.mark.parametrize("tp", [1, 2, 5, 8])
def test_float32_bytes_arrive_on_every_axis_size(tp):
    assert_every_move(tp, np.float32, make_axis(tp))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_bytes_of_every_dtype_arrive_on_permuted_devices(dtype):
    assert_every_move(4, dtype, make_axis(4))


def test_bytes_arrive_on_an_explicit_axis():
    assert_every_move(4, ml_dtypes.bfloat16, make_axis(4, axis_type=AxisType.Explicit))


def test_booleans_arrive():
    x = np.random.default_rng(0).integers(0, 2, (4, 9)).astype(bool)
    gathered = on_ranks(lambda a: transport.ring_all_gather(a, "tp"), x)
    np.testing.assert_array_equal(gathered, np.stack([x.reshape(-1)] * 4))


def test_empty_arrays_and_scalars_are_moved():
    empty = np.zeros((4, 0, 3), np.float32)
    assert on_ranks(lambda a: transport.ring_all_gather(a, "tp"), empty).size == 0
    scalars = np.random.default_rng(0).standard_normal(4, np.float32)
    stacked = on_ranks(
        lambda a: transport.ring_all_gather(a, "tp", tiled=False), scalars
    )
    assert_same_bytes(stacked, np.stack([scalars] * 4), "scalars")


def test_a_plain_ppermute_of_bfloat16_loses_nan_payloads_on_cpu():
    x = random_bytes((4, 64), ml_dtypes.bfloat16)
    ring = [(r, (r + 1) % 4) for r in range(4)]
    plain = on_ranks(lambda a: lax.ppermute(a, "tp", ring), x)
    assert np.any(plain.view(np.uint16) != np.roll(x, 1, 0).view(np.uint16))


def test_rank_order_is_that_of_the_mesh_and_not_of_device_ids():
    devices = permuted_devices(8)
    ids = np.array([d.id for d in devices])
    assert np.all(ids != np.arange(8))
    x = np.arange(8, dtype=np.int32)[:, None]
    gathered = on_ranks(lambda a: transport.ring_all_gather(a, "tp"), x)
    for row in gathered:
        assert row.tolist() == list(range(8))
        assert row.tolist() != np.argsort(ids).tolist()


def test_each_axis_of_a_two_dimensional_mesh_is_its_own_ring():
    mesh = Mesh(np.array(permuted_devices(8)).reshape(2, 4), ("ep", "tp"))
    x = random_bytes((2, 4, 6), np.float32)

    def per_rank(a):
        over_tp = transport.ring_all_gather(a, "tp", axis=1)
        return over_tp, transport.exchange(a, "ep", 1)

    f = jax.shard_map(
        per_rank,
        mesh=mesh,
        in_specs=P("ep", "tp"),
        out_specs=P("ep", "tp"),
        check_vma=False,
    )
    over_tp, over_ep = jax.tree.map(np.asarray, jax.jit(f)(x))
    for rank in range(4):
        assert_same_bytes(over_tp[:, 4 * rank : 4 * rank + 4], x, "over tp")
    assert_same_bytes(over_ep, x[::-1], "over ep")


def test_a_thousand_moves_in_a_scan_lose_nothing():
    tp, repeats, odd = 4, 1000, 1664525
    x = random_bytes((tp, 64), np.uint32)

    def thousand(seed):
        def body(state, _):
            passed = transport.chain_step(state, "tp", 1)
            moved = transport.shift(transport.exchange(passed, "tp", 2), "tp")
            return (state * jnp.uint32(odd) ^ moved) + seed, None

        return lax.scan(body, seed, None, length=repeats)[0]

    def thousand_on_host(lost_at):
        state = x.copy()
        for repeat in range(repeats):
            passed = state.copy()
            if repeat != lost_at:
                passed[2] = state[1]
            moved = np.roll(passed[np.arange(tp) ^ 2], 1, 0)
            state = (state * np.uint32(odd) ^ moved) + x
        return state

    actual = on_ranks(thousand, x)
    assert_same_words(actual, thousand_on_host(lost_at=None), "a thousand moves")
    one_lost = thousand_on_host(lost_at=500)
    assert count_different_words(actual, one_lost) > actual.size // 2


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_gather_is_differentiable_in_narrow_floats_as_well(dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (4, 3)).astype(dtype)
    weight = rng.integers(-4, 5, (4, 12)).astype(dtype)

    def loss(a, w):
        return jnp.sum(w * transport.ring_all_gather(a, "tp"))

    gradient = on_ranks(jax.grad(loss), x, weight)
    expected = weight.astype(np.float32).sum(0).reshape(4, 3)
    np.testing.assert_array_equal(gradient.astype(np.float32), expected)
    assert np.any(expected != 0)


def collectives(f, *operands):
    lowered = mapped(f, make_axis(4)).lower(*operands)
    text = lowered.as_text() + lowered.compile().as_text()
    found = re.findall(
        r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
        r"(?:-start)?\(",
        text,
    )
    return set(found)


def test_the_compiled_moves_are_point_to_point_only():
    x = random_bytes((4, 6, 4), np.float32)
    blocks = random_bytes((4, 4, 3, 2), np.float32)
    found = collectives(lambda a, b: every_move(a, b, 4), x, blocks)
    assert found == {"collective-permute"}
    assert "all-reduce" in collectives(lambda a: lax.psum(a, "tp"), x)


def test_the_module_names_no_collective_but_ppermute():
    source = inspect.getsource(transport)
    calls = set(re.findall(r"lax\.(p\w+|all_\w+)\(", source))
    assert calls == {"ppermute"}
    assert not re.search(r"jnp\.sum|lax\.add|\.at\[.*\]\.add", source)


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda x: transport.gather_to(x, "tp", 4), "`root`.*size 4.*got 4"),
        (lambda x: transport.broadcast_from(x, "tp", -1), "`root`.*got -1"),
        (lambda x: transport.scatter_from(x, "tp", 7), "`root`.*got 7"),
        (lambda x: transport.chain_step(x, "tp", 3), r"`step`.*\[0, 3\).*got 3"),
        (lambda x: transport.exchange(x, "tp", 3), r"got 3.*\[1, 2\]"),
        (lambda x: transport.exchange(x, "tp", 4), r"got 4.*\[1, 2\]"),
        (lambda x: transport.exchange(x, "tp", 0), "`distance`.*got 0"),
        (lambda x: transport.shift(x, "ep"), "'ep'.*shard_map"),
        (lambda x: transport.shift(x, ("tp",)), "`axis_name`.*one mesh axis"),
    ],
)
def test_a_rank_that_does_not_exist_is_refused(move, message):
    x = np.ones((4, 4, 3), np.float32)
    with pytest.raises(MeshError, match=message):
        on_ranks(move, x)


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda x: transport.scatter_from(x, "tp"), r"tp=4.*\[3, 2\]"),
        (lambda x: transport.all_to_all_chunks(x, "tp"), r"tp=4.*\[3, 2\]"),
        (lambda x: transport.all_to_all_chunks(x[0, 0], "tp"), r"shape \[\]"),
        (lambda x: transport.ring_all_gather(x, "tp", axis=2), "`axis`.*got 2"),
        (lambda x: transport.ring_all_gather(x[0, 0], "tp"), "`axis`"),
    ],
)
def test_an_array_of_the_wrong_shape_is_refused(move, message):
    x = np.ones((4, 3, 2), np.float32)
    with pytest.raises(ShapeError, match=message):
        on_ranks(move, x)
