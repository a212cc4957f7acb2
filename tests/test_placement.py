"""What a device holds, what is read for it, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import normal, weight
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp import (
    Bf16Weight,
    Fp8Weight,
    JaxtpError,
    Nvfp4Weight,
    ReductionPlan,
    checkpoint,
    oracle,
)
from jaxtp.errors import (
    ActivationError,
    DtypeError,
    FormatError,
    MeshError,
    NonFiniteError,
    PlanError,
    PlanTypeError,
    ShapeError,
)
from jaxtp.testing import assert_same_words


class Counting:
    """An array that counts the bytes of every read."""

    def __init__(self, array):
        self.array, self.bytes_read, self.largest = array, 0, 0
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index):
        read = self.array[index]
        self.bytes_read += read.nbytes
        self.largest = max(self.largest, read.nbytes)
        return read


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_row_placement_holds_whole_slots_in_order(tp):
    w = weight("bf16", 20, 1280)
    p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row")
    assert p.value.shape == (8, 20, 160)
    for shard in p.value.addressable_shards:
        slots = range(*shard.index[0].indices(8))
        assert len(slots) == 8 // tp
        for i, slot in enumerate(slots):
            want = w.value[:, 160 * slot : 160 * (slot + 1)]
            assert_same_words(shard.data[i], want, what=f"slot {slot}")


@pytest.mark.parametrize("tp", [1, 8])
def test_a_column_placement_holds_padded_rows(tp):
    w = weight("e4m3", 200, 416)
    p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="column")
    assert p.value.shape == (8, 256, 64)
    whole = np.asarray(p.value).transpose(1, 0, 2).reshape(256, 512)
    assert_same_words(whole[:200, :416], w.code)
    assert not whole[200:].astype(np.float32).any()
    assert not whole[:, 416:].astype(np.float32).any()


@pytest.mark.parametrize("parallel", ["row", "column", "replicated"])
def test_every_segment_has_the_scale_of_its_global_row_and_column(parallel):
    w = weight("e4m3", 300, 1280)
    p = jaxtp.place(w, jaxtp.make_mesh(tp=8), parallel=parallel)
    scale = np.asarray(p.scale)
    for slot in range(8):
        segments = p.layout.segments(slot, 128)
        for j, (start, _) in enumerate(segments):
            want = w.scale[np.arange(300) // 128, start // 128]
            assert_same_words(scale[slot, j, :300], want)
        assert not scale[slot, len(segments) :].any()


def test_a_device_reads_its_own_bytes_once():
    w = weight("nvfp4", 64, 1280)
    parts = [Counting(a) for a in (w.code, w.scale)]
    lazy = Nvfp4Weight(*parts, w.global_scale)
    jaxtp.place(lazy, jaxtp.make_mesh(tp=8), parallel="row")
    assert [p.bytes_read for p in parts] == [w.code.nbytes, w.scale.nbytes]
    assert parts[0].largest == 64 * 80


def test_a_checkpoint_weight_is_read_only_where_a_device_needs_it(tmp_path):
    values = {"layer.proj.weight": normal(64, 1280)}
    checkpoint.save(tmp_path, values, layout="deepseek")
    with checkpoint.open(tmp_path) as ckpt:
        w = ckpt.weight("layer.proj")
        assert ckpt.bytes_read == 0
        part = w.code[:, 160:320]
        assert (part.shape, ckpt.bytes_read) == ((64, 160), 64 * 160)
        p = jaxtp.place(w, jaxtp.make_mesh(tp=8), parallel="row")
        # Codes once; the ten scales of the one block row once for each device.
        assert ckpt.bytes_read - 64 * 160 == 64 * 1280 + 8 * 40
        assert_same_words(p.value, jaxtp.place(w, p.mesh, parallel="row").value)


@pytest.mark.parametrize("format", ["bf16", "e4m3", "nvfp4"])
def test_a_bank_is_placed_by_experts_rows_or_columns(format):
    matrices = [weight(format, 40, 160, seed=s) for s in range(4)]
    bank = jax.tree.map(lambda *parts: np.stack(parts), *matrices)
    assert bank.shape == (4, 40, 160)
    mesh = jaxtp.make_mesh(tp=2, ep=2)
    for parallel in ("expert", "row", "column", "replicated"):
        p = jaxtp.place(bank, mesh, parallel=parallel)
        for e, matrix in enumerate(matrices):
            one = jaxtp.place(matrix, mesh, parallel=_alone(parallel))
            assert_same_words(np.asarray(p.value)[e], one.value)
            if one.scale is not None:
                assert_same_words(np.asarray(p.scale)[e], one.scale)
    experts = jaxtp.place(bank, mesh, parallel="expert")
    assert {s.data.shape[0] for s in experts.value.addressable_shards} == {2}


def _alone(parallel):
    return "replicated" if parallel == "expert" else parallel


def test_a_placed_weight_is_a_pytree_of_arrays_with_a_tree_of_specs():
    p = jaxtp.place(weight("nvfp4", 40, 160), jaxtp.make_mesh(tp=4), parallel="row")
    assert len(jax.tree.leaves(p)) == 3
    specs = p.specs()
    assert (specs.value, specs.scale, specs.global_scale) == (P("tp"), P("tp"), P())
    shapes = jax.eval_shape(lambda p: p, p)
    assert shapes.value.shape == p.value.shape
    moved = jax.tree.map(lambda a: a, p)
    assert moved.plan == p.plan
    x = normal(2, 160)
    donated = jax.jit(
        lambda x, p: jaxtp.row_parallel(x, p, activation="int8"), donate_argnums=0
    )
    assert donated(jnp.asarray(x), p).shape == (2, 40)


def test_placing_holds_little_beside_the_placed_arrays():
    import tracemalloc

    n, k = 4096, 2048
    part = Counting(np.zeros((n, k), ml_dtypes.bfloat16))
    mesh = jaxtp.make_mesh(tp=8)
    tracemalloc.start()
    p = jaxtp.place(Bf16Weight(part), mesh, parallel="row")
    p.value.block_until_ready()
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    share = p.value.nbytes // 8
    # Placed buffers are NumPy's where the CPU device takes them without a copy.
    assert peak - max(now, p.value.nbytes) < 0.3 * share
    assert part.largest <= 4 << 20


@pytest.mark.parametrize("parallel", ["row", "column", "replicated"])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_code_is_named_with_its_index(parallel, byte):
    w = weight("e4m3", 40, 320)
    code = w.code.copy()
    code.view(np.uint8)[3, 170] = byte
    bad = Fp8Weight(code, w.scale)
    with pytest.raises(NonFiniteError, match=r"`code`.*\(3, 170\)"):
        jaxtp.place(bad, jaxtp.make_mesh(tp=4), parallel=parallel)
    with pytest.raises(NonFiniteError, match=r"`code`.*\(3, 170\)"):
        jaxtp.project(normal(1, 320), bad, activation="e4m3")


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_an_illegal_block_scale_is_named_with_its_index(value):
    w = weight("e4m3", 140, 320)
    scale = w.scale.copy()
    scale[1, 2] = value
    with pytest.raises(NonFiniteError, match=r"`scale`.*\(1, 2\)"):
        jaxtp.place(Fp8Weight(w.code, scale), jaxtp.make_mesh(tp=4), parallel="column")


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0xB8])
def test_an_illegal_nvfp4_scale_is_named_with_its_index(byte):
    w = weight("nvfp4", 40, 320)
    scale = w.scale.copy()
    scale.view(np.uint8)[5, 11] = byte
    bad = Nvfp4Weight(w.code, scale, w.global_scale)
    with pytest.raises(NonFiniteError, match=r"`scale`.*\(5, 11\)"):
        jaxtp.place(bad, jaxtp.make_mesh(tp=4), parallel="row")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_an_illegal_global_scale_is_refused(value):
    w = weight("nvfp4", 40, 320)
    bad = Nvfp4Weight(w.code, w.scale, np.float32(value))
    with pytest.raises(NonFiniteError, match="`global_scale`"):
        jaxtp.place(bad, jaxtp.make_mesh(tp=4), parallel="row")


def mesh(tp=2):
    return jaxtp.make_mesh(tp=tp)


def placed(format="bf16", parallel="row", **options):
    return jaxtp.place(weight(format, 40, 160), mesh(), parallel=parallel, **options)


REFUSALS = {
    "tp does not divide": (
        lambda: jaxtp.place(
            weight("bf16", 40, 160), mesh(4), parallel="row", plan=ReductionPlan(6)
        ),
        PlanError,
        r"divide the 6 slots.*\[1, 2, 3, 6\]",
    ),
    "out_slots": (
        lambda: jaxtp.place(
            weight("bf16", 40, 160), mesh(8), parallel="column", out_slots=4
        ),
        PlanError,
        "out_slots",
    ),
    "blocks of bf16": (
        lambda: placed(plan=ReductionPlan("blocks")),
        PlanTypeError,
        "E4M3",
    ),
    "axis": (lambda: placed(axis_name="model"), MeshError, "axis 'model'"),
    "parallel": (lambda: placed(parallel="rows"), MeshError, "'rows'"),
    "expert of a matrix": (
        lambda: jaxtp.place(
            weight("bf16", 40, 160), jaxtp.make_mesh(ep=2), parallel="expert"
        ),
        ShapeError,
        "bank",
    ),
    "too few devices": (lambda: jaxtp.make_mesh(tp=16), MeshError, "16 devices; got 8"),
    "array for a weight": (
        lambda: jaxtp.place(np.zeros((4, 4)), mesh(), parallel="row"),
        DtypeError,
        "ndarray",
    ),
    "scale shape": (
        lambda: placed_parts(Fp8Weight(CODE, np.ones((1, 3), np.float32))),
        ShapeError,
        r"\(1, 2\).*\(1, 3\)",
    ),
    "scale dtype": (
        lambda: placed_parts(Fp8Weight(CODE, np.ones((1, 2)))),
        DtypeError,
        "float64",
    ),
    "block shape": (
        lambda: placed_parts(
            Fp8Weight(CODE, np.ones((1, 4), np.float32), block_shape=(128, 48))
        ),
        FormatError,
        "multiple of 32",
    ),
    "odd K of NVFP4": (
        lambda: placed_parts(
            Nvfp4Weight(
                np.zeros((4, 12), np.uint8),
                np.zeros((4, 1), ml_dtypes.float8_e4m3fn),
                np.float32(1),
            )
        ),
        ShapeError,
        "multiple of 16",
    ),
    "scale kind": (
        lambda: placed_parts(
            Nvfp4Weight(
                np.zeros((4, 16), np.uint8),
                np.zeros((4, 2), ml_dtypes.float8_e4m3fn),
                np.float32(1),
                "reciprocal",
            )
        ),
        FormatError,
        "'reciprocal'",
    ),
    "x columns": (
        lambda: jaxtp.row_parallel(normal(2, 161), placed()),
        ShapeError,
        "160 or 256",
    ),
    "x rank": (
        lambda: jaxtp.row_parallel(normal(160), placed()),
        ShapeError,
        r"\(160,",
    ),
    "x dtype": (
        lambda: jaxtp.row_parallel(np.zeros((2, 160), np.float16), placed()),
        DtypeError,
        "float16",
    ),
    "f32 under bf16": (
        lambda: jaxtp.row_parallel(normal(2, 160), placed(), activation="bf16"),
        DtypeError,
        "Cast `x`",
    ),
    "no activation": (
        lambda: jaxtp.row_parallel(normal(2, 160), placed("e4m3")),
        ActivationError,
        "'bf16', 'e4m3'",
    ),
    "activation of another format": (
        lambda: jaxtp.row_parallel(normal(2, 160), placed("e4m3"), activation="int8"),
        ActivationError,
        "'int8'",
    ),
    "column weight in a row call": (
        lambda: jaxtp.row_parallel(normal(2, 160), placed(parallel="column")),
        MeshError,
        "parallel='row'",
    ),
    "weight that is not placed": (
        lambda: jaxtp.row_parallel(normal(2, 160), weight("bf16", 40, 160)),
        MeshError,
        "jaxtp.place",
    ),
    "another plan": (
        lambda: jaxtp.project(
            normal(2, 160), placed(parallel="replicated"), plan=ReductionPlan(1)
        ),
        PlanError,
        "num_slots=8",
    ),
    "x on Explicit axes, weight not placed": (
        lambda: jaxtp.project(
            on_explicit_axes(normal(2, 160)), weight("bf16", 40, 160)
        ),
        MeshError,
        "parallel='replicated'",
    ),
    "float64 x": (
        lambda: jaxtp.row_parallel(np.zeros((2, 160)), placed()),
        DtypeError,
        "float64",
    ),
    "float64 x, weight not placed": (
        lambda: jaxtp.project(np.zeros((2, 160)), weight("bf16", 40, 160)),
        DtypeError,
        "float64",
    ),
    "list for x": (
        lambda: jaxtp.row_parallel([[1.0] * 160], placed()),
        DtypeError,
        "list",
    ),
    "wide x for the oracle": (
        lambda: oracle.row_parallel(normal(2, 167), weight("bf16", 40, 160)),
        ShapeError,
        r"\(2, 167\)",
    ),
    "narrow x for the oracle": (
        lambda: oracle.row_parallel(normal(2, 1), weight("bf16", 40, 160)),
        ShapeError,
        r"\(2, 1\)",
    ),
    "another axis in a local call": (
        lambda: local_call("dp"),
        MeshError,
        "must be 'tp'.*'dp'",
    ),
    "unbound axis in a local call": (
        lambda: jaxtp.row_parallel_local(normal(2, 160), placed(), axis_name="tp"),
        MeshError,
        "shard_map",
    ),
    "moved weight": (
        lambda: jaxtp.row_parallel(
            normal(2, 160), jax.device_put(placed(), jax.devices()[0])
        ),
        MeshError,
        "place the weight again",
    ),
    "plan of another type": (lambda: placed(plan="tree"), PlanTypeError, "'tree'"),
    "no mesh": (
        lambda: jaxtp.place(weight("bf16", 40, 160), None, parallel="row"),
        MeshError,
        "NoneType",
    ),
    "no array": (
        lambda: placed_parts(Bf16Weight([[1.0]])),
        DtypeError,
        "`value`.*list",
    ),
    "block shape of another type": (
        lambda: placed_parts(Fp8Weight(CODE, np.ones((1, 2), np.float32), 128)),
        FormatError,
        "tuple of two ints",
    ),
    "no output slots": (
        lambda: placed(parallel="column", out_slots=0),
        PlanError,
        "out_slots",
    ),
    "mesh size of another type": (
        lambda: jaxtp.make_mesh(tp=2.0),
        MeshError,
        "2.0",
    ),
    "schedule": (
        lambda: jaxtp.row_parallel(
            normal(2, 160), placed(), reduce=False, schedule="ring"
        ),
        PlanError,
        "'ring'",
    ),
    "unknown implementation": (
        lambda: jaxtp.row_parallel(normal(2, 160), placed(), implementation="triton"),
        ValueError,
        "'triton'",
    ),
}
CODE = np.zeros((40, 160), ml_dtypes.float8_e4m3fn)


def local_call(axis_name):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    p = jaxtp.place(weight("bf16", 40, 160), mesh, parallel="row")

    def local(x, p):
        return jaxtp.row_parallel_local(x, p, axis_name=axis_name)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(None, "tp"), p.specs()),
        out_specs=P(),
        check_vma=False,
    )(normal(2, 256), p)


def on_explicit_axes(x):
    mesh = jaxtp.make_mesh(tp=2, axis_types=AxisType.Explicit)
    return jax.device_put(x, NamedSharding(mesh, P()))


def placed_parts(w):
    return jaxtp.place(w, mesh(), parallel="row")


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS.values(), ids=REFUSALS)
def test_bad_input_is_refused_before_any_arithmetic(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_mosaic_on_a_cpu_is_refused_and_names_what_runs():
    with pytest.raises(
        NotImplementedError, match="implementation='portable' runs there"
    ):
        jaxtp.row_parallel(normal(2, 160), placed(), implementation="mosaic")


def test_a_bank_is_not_a_matrix():
    w = weight("bf16", 40, 160)
    bank = Bf16Weight(np.stack([w.value, w.value]))
    p = jaxtp.place(bank, mesh(), parallel="row")
    with pytest.raises(NotImplementedError, match=r"weight\.expert"):
        jaxtp.row_parallel(normal(2, 160), p)
    assert_same_words(bank.expert(1).value, w.value)
    with pytest.raises(JaxtpError, match=r"\[0, 2\)"):
        bank.expert(2)


def test_the_gradient_of_a_weight_is_refused():
    p, x = placed("nvfp4"), jnp.asarray(normal(2, 160))

    def loss(p):
        return jaxtp.row_parallel(x, p, activation="int8").sum()

    with pytest.raises(NotImplementedError, match="with respect to `x`"):
        jax.grad(loss, allow_int=True)(p)


def test_x_on_the_same_devices_in_another_order_is_moved():
    w, x = weight("bf16", 40, 160), normal(2, 160)
    p = jaxtp.place(
        w, jaxtp.make_mesh(tp=4, devices=jax.devices()[3::-1]), parallel="row"
    )
    on_mesh = jax.device_put(x, NamedSharding(jaxtp.make_mesh(tp=4), P()))
    assert_same_words(jaxtp.row_parallel(on_mesh, p), jaxtp.project(x, w))


@pytest.mark.parametrize("types", [("Explicit", "Auto"), ("Auto", "Explicit")])
def test_a_mesh_may_mix_axis_types(types):
    w, x = weight("e4m3", 40, 320), normal(4, 320)
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2),
        ("dp", "tp"),
        axis_types=tuple(AxisType[name] for name in types),
    )
    want = oracle.row_parallel(x, w, tp=2, activation="e4m3")
    on_mesh = jax.device_put(x, NamedSharding(mesh, P("dp")))
    for parallel, call in (
        ("row", jaxtp.row_parallel),
        ("column", jaxtp.column_parallel),
        ("replicated", jaxtp.project),
    ):
        p = jaxtp.place(w, mesh, parallel=parallel)
        assert_same_words(call(x, p, activation="e4m3"), want, what=parallel)
        assert_same_words(call(on_mesh, p, activation="e4m3"), want, what=parallel)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_have_a_result_and_a_gradient(tokens):
    p, x = placed(), jnp.asarray(normal(max(tokens, 1), 160)[:tokens])
    assert jaxtp.row_parallel(x, p).shape == (tokens, 40)
    dx = jax.grad(lambda x: jaxtp.row_parallel(x, p).sum())(x)
    assert dx.shape == x.shape


def test_padding_of_a_local_x_may_hold_anything():
    w, x = weight("bf16", 40, 160), normal(2, 160)
    mesh = jaxtp.make_mesh(tp=4)
    p = jaxtp.place(w, mesh, parallel="row")
    dirty = np.full((2, 256), np.nan, np.float32)
    dirty[:, :160] = x
    run = jax.shard_map(
        lambda x, p: jaxtp.row_parallel_local(x, p, axis_name="tp"),
        mesh=mesh,
        in_specs=(P(None, "tp"), p.specs()),
        out_specs=P(),
        check_vma=False,
    )
    assert_same_words(run(dirty, p), jaxtp.project(x, w))


@pytest.mark.parametrize("k", [48, 80, 416])
@pytest.mark.parametrize("format", ["bf16", "e4m3", "nvfp4"])
def test_an_unplaced_weight_may_be_a_constant_or_an_argument(format, k):
    activation = (
        "f32" if format == "bf16" else {"e4m3": "e4m3", "nvfp4": "int8"}[format]
    )
    w, x = weight(format, 24, k), jnp.asarray(normal(3, k))
    on_device = jax.tree.map(jnp.asarray, w)
    for slots in (1, 3, 8):
        plan = ReductionPlan(slots)
        want = oracle.project(x, w, plan=plan, activation=activation)

        def f(x, w, plan=plan):
            return jaxtp.project(x, w, plan=plan, activation=activation)

        assert_same_words(jax.jit(lambda x, f=f: f(x, w))(x), want, what="NumPy")
        assert_same_words(jax.jit(lambda x, f=f: f(x, on_device))(x), want, what="JAX")
        assert_same_words(jax.jit(f)(x, on_device), want, what="argument")
