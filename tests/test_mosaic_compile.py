"""Mosaic kernels lower on every JAX, and compile for Hopper without a GPU."""

import jax
import pytest
from mosaic_compile import KERNELS, SHAPES, compile_all, kernel, missing

SHARED_MEMORY_LIMIT = 227 * 1024

needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", ["unaligned", "one_slot"])
def test_every_kernel_lowers_to_one_mosaic_call(name, shape):
    function, *specs = kernel(name, *SHAPES[shape])
    lowered = jax.jit(function).trace(*specs).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kernel_fits_a_hopper_block(name, shape):
    result = compile_all()[name, shape]
    assert result.spilled_bytes() == 0
    assert result.registers() <= 255
    assert result.shared_bytes() <= SHARED_MEMORY_LIMIT
    assert "warning" not in result.report.lower(), result.report


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_bf16_tensor_core_steps_of_sixteen_columns(name, shape):
    result = compile_all()[name, shape]
    ops = result.ptx_ops()
    steps = [op for op in ops if op.startswith("wgmma")]
    assert len(steps) == 1, steps
    assert steps[0].endswith("k16.f32.bf16.bf16")
    # Eight steps are a tile of 128 columns: the same chain for every T.
    assert ops[steps[0]] % 8 == 0
    assert result.sass_ops()["HGMMA"] > 0


@needs_compiler
@pytest.mark.parametrize("name", ["bf16", "nvfp4_bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bf16_program_adds_in_the_tensor_cores_alone(name, shape):
    ops = compile_all()[name, shape].sass_ops()
    assert set(ops) == {"HGMMA"}, ops


@needs_compiler
@pytest.mark.parametrize("name", ["e4m3_bf16", "e4m3_e4m3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_e4m3_scale_enters_the_sum_by_one_fused_multiply_add(name, shape):
    result = compile_all()[name, shape]
    ptx, sass = result.ptx_ops(), result.sass_ops()
    fused = ptx["fma.rn.f32"]
    products = fused if name == "e4m3_e4m3" else 0
    assert fused > 0
    assert ptx["mul.f32"] + ptx["mul.rn.f32"] == products, ptx
    assert ptx["add.f32"] + ptx["add.rn.f32"] == 0, ptx
    assert (sass["FADD"], sass["FMUL"] > 0) == (0, products > 0), sass


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_an_int8_group_is_rounded_before_it_is_added(shape):
    result = compile_all()["nvfp4_int8", shape]
    ptx, sass = result.ptx_ops(), result.sass_ops()
    groups = ptx["mul.rn.f32"]
    assert groups > 0
    # The only fused operation is the sum of the two exact halves.
    assert ptx["fma.rn.f32"] == groups, ptx
    assert ptx["add.f32"] + ptx["add.rn.f32"] == groups, ptx
    assert sass["FFMA"] == sass["FADD"] > 0, sass
