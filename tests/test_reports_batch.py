"""Public reports of rows that change with their neighbours, their number or place.

Each test names the report it comes from and has a control that must change words: the
reported program, or `jnp.dot`, whose inner order follows the shape of the call.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import activations, weight

import jaxtp
from jaxtp import formats
from jaxtp.testing import assert_same_words, count_different_words


def row_weight(w, tp):
    return jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row")


def decoded(x):
    """Each row of `x` through E4M3 with one scale, in float32."""
    code, d = formats.quantize_e4m3(x)
    return np.asarray(code, np.float32) * np.asarray(d)[..., None]


def test_eight_identical_prompts_have_identical_words():
    """Rows of the same 25-row block differed by their position on four ranks.

    https://github.com/sgl-project/sglang-jax/issues/1270
    """
    block, w = activations(25, 2048, "bf16"), weight("bf16", 2048, 2048)
    p, x = row_weight(w, 4), np.tile(block, (8, 1))
    y = np.asarray(jaxtp.row_parallel(x, p)).reshape(8, 25, -1)
    partials = np.asarray(jaxtp.row_parallel(x, p, reduce=False))
    partials = partials.reshape(8, 8, 25, -1)
    for position in range(1, 8):
        assert_same_words(y[position], y[0], what=f"prompt {position}")
        assert_same_words(partials[:, position], partials[:, 0])
    # Control: the order of a ring, which starts after the owner of the rows.
    ranks = partials[::2, 0] + partials[1::2, 0]
    first, second = (
        ((ranks[c] + ranks[c - 3]) + ranks[c - 2]) + ranks[c - 1] for c in (0, 1)
    )
    assert count_different_words(first, second) >= 0.01 * first.size


@pytest.mark.parametrize(
    ("format", "activation"), [("e4m3", "e4m3"), ("nvfp4", "int8")]
)
def test_an_outlier_in_another_row_changes_no_word(format, activation):
    """One dynamic scale for the whole batch: all values of row 0 change.

    https://github.com/vllm-project/vllm/issues/57016
    https://github.com/vllm-project/vllm/pull/57092
    """
    x, w = activations(8, 512, activation), weight(format, 64, 512)
    want = np.asarray(jaxtp.project(x, w, activation=activation))
    loud = x.copy()
    loud[1:] *= 1000
    y = np.asarray(jaxtp.project(loud, w, activation=activation))
    assert_same_words(y[0], want[0])
    alone = np.asarray(jaxtp.project(x[:1], w, activation=activation))
    assert_same_words(alone[0], want[0])
    # Control: amax over all rows.
    quiet, together = decoded(x.reshape(1, -1)), decoded(loud.reshape(1, -1))
    assert count_different_words(together[:, :512], quiet[:, :512]) >= 0.01 * 512


def chunked(x, values, width):
    """`x @ values.T` by chunks of K, added ascending."""
    total = np.zeros((len(x), len(values)), np.float32)
    for start in range(0, x.shape[1], width):
        columns = slice(start, start + width)
        total = total + x[:, columns] @ values[:, columns].T
    return total


@pytest.mark.parametrize(
    ("format", "activation", "counts"),
    [
        ("e4m3", "e4m3", (1, 8, 16, 33, 65, 128)),
        ("bf16", "bf16", (1, 7, 31, 64, 127)),
        ("nvfp4", "bf16", (1, 15, 32, 129)),
        ("nvfp4", "int8", (1, 7, 33, 129)),
    ],
)
def test_no_number_of_rows_chooses_another_program(format, activation, counts):
    """Another kernel below a number of rows changed FP8 results.

    https://github.com/vllm-project/vllm/pull/37718
    """
    x, w = activations(256, 512, activation), weight(format, 64, 512)
    want = np.asarray(jaxtp.project(x, w, activation=activation))
    for count in counts:
        y = jaxtp.project(x[:count], w, activation=activation)
        assert_same_words(y, want[:count], what=f"{count} rows")
    # Control: two depths of a tile of K.
    few, many = (
        chunked(x[:1].astype(np.float32), np.asarray(w.dequantize()), width)
        for width in (32, 128)
    )
    assert count_different_words(few, many) >= 0.01 * few.size


@pytest.mark.parametrize(("tokens", "k", "n"), [(64, 2048, 2048), (8, 4096, 512)])
def test_a_row_alone_has_its_words_in_the_batch(tokens, k, n):
    """The first of 2048 rows alone, or one row padded to eight.

    https://github.com/jax-ml/jax/issues/18165
    https://github.com/jax-ml/jax/issues/34080
    https://github.com/jax-ml/jax/issues/26308
    https://github.com/NVIDIA/TransformerEngine/issues/2986
    """
    x, w = activations(tokens, k, "bf16"), weight("bf16", n, k)
    y = np.asarray(jaxtp.project(x, w))
    assert_same_words(jaxtp.project(x[:1], w), y[:1])
    padded = np.zeros_like(x)
    padded[:1] = x[:1]
    assert_same_words(np.asarray(jaxtp.project(padded, w))[:1], y[:1])
    # Control: `jnp.dot` of the same operands.
    x, values = jnp.asarray(x), jnp.asarray(w.value).T
    one, all_rows = (
        np.asarray(jnp.dot(rows, values, preferred_element_type=jnp.float32))
        for rows in (x[:1], x)
    )
    assert count_different_words(one, all_rows[:1]) >= 0.01 * n


@pytest.mark.parametrize(
    ("schedule", "counts"), [("exchange", (1, 16, 17, 512)), ("chain", (1, 17))]
)
def test_rows_keep_their_words_inside_tensors_of_every_size(schedule, counts):
    """Channels by message size changed words, with the algorithm pinned.

    https://github.com/sgl-project/sglang/pull/34159
    """
    x, w = activations(4096, 256, "bf16"), weight("bf16", 32, 256)
    p = row_weight(w, 4)
    want = np.asarray(jaxtp.row_parallel(x, p, schedule=schedule))
    for rows in counts:
        y = jaxtp.row_parallel(x[:rows], p, schedule=schedule)
        assert_same_words(y, want[:rows], what=f"{rows} rows")
    # Control: two channels halve the order, from 512 rows on.
    partials = np.asarray(jaxtp.row_parallel(x, p, reduce=False))
    ranks = partials[::2] + partials[1::2]
    chain = ((ranks[0] + ranks[1]) + ranks[2]) + ranks[3]
    halves = (ranks[0] + ranks[1]) + (ranks[2] + ranks[3])
    assert count_different_words(chain[:16], halves[:16]) >= 0.01 * chain[:16].size
