"""Compiles Mosaic kernels for Hopper on a machine without a GPU.

Needs the CUDA plugin wheels of JAX and NVIDIA's compiler wheels:
`pip install jax-cuda13-pjrt jax-cuda13-plugin nvidia-cuda-nvcc nvidia-nvvm
nvidia-cuda-nvdisasm`. Run as a script it compiles every case and prints JSON: the
plugin registers without a GPU only in a process that asked for the CPU from its start.
"""

import collections
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.bf16_matmul import mosaic as bf16
from pallas_kernels.fp8_matmul import mosaic as fp8
from pallas_kernels.nvfp4_matmul import mosaic as nvfp4

ROOT = pathlib.Path(__file__).parent
DEVICE_FACTS = ROOT / "data" / "h200.txtpb"
E4M3 = jnp.float8_e4m3fn
BLOCK = 128

KERNELS = ("bf16", "e4m3_bf16", "e4m3_e4m3", "nvfp4_bf16", "nvfp4_int8")
SHAPES = {
    "aligned": (8, 4096, 512, 8),
    "unaligned": (8, 576, 160, 3),
    "one_slot": (1, 80, 1024, 129),
    "ragged": (2, 20, 96, 64),
}
"""Slots, rows, columns of a slot, tokens."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one kernel.

    Attributes:
        ptx: The PTX text.
        sass: The machine code, disassembled.
        report: The assembler's report.
        resources: Mosaic's own account of shared memory and barriers.
    """

    ptx: str
    sass: str
    report: str
    resources: str

    def registers(self):
        return int(re.search(r"Used (\d+) registers", self.report)[1])

    def spilled_bytes(self):
        found = re.findall(r"(\d+) bytes (?:stack frame|spill)", self.report)
        return sum(int(count) for count in found)

    def shared_bytes(self):
        return int(re.search(r"smem_scratch_bytes=(\d+)", self.resources)[1])

    def ptx_ops(self):
        """How often each float32 operation and each `wgmma` stands in the PTX."""
        pattern = r"\b((?:fma|mul|add|sub)(?:\.\w+)*\.f32|wgmma\.mma_async\S+)"
        return collections.Counter(re.findall(pattern, self.ptx))

    def sass_ops(self):
        """How often each arithmetic opcode stands in the machine code."""
        return collections.Counter(
            re.findall(r"\b(\w*FFMA\w*|FADD|FMUL|HGMMA)", self.sass)
        )


def kernel(name, slots, n, width, tokens):
    """A function of one kernel, and the specs of its arguments."""
    spec = jax.ShapeDtypeStruct
    x = spec((tokens, slots * width), jnp.bfloat16)
    if name == "bf16":
        return bf16.bf16_matmul, x, spec((slots, n, width), jnp.bfloat16)
    if name.startswith("e4m3"):
        return _e4m3_kernel(name, x, slots, n, width)
    codes = spec((slots, n, width // 2), jnp.uint8)
    scale = spec((slots, n, width // 16), E4M3)
    if name == "nvfp4_bf16":
        return nvfp4.nvfp4_matmul, x, codes, scale
    d = spec((tokens, slots * width // 32), jnp.float32)
    return nvfp4.nvfp4_int8_matmul, spec(x.shape, jnp.int8), d, codes, scale


def _e4m3_kernel(name, x, slots, n, width):
    spec = jax.ShapeDtypeStruct
    segments = max(
        ((g + 1) * width - 1) // BLOCK - g * width // BLOCK + 1 for g in range(slots)
    )
    codes = spec((slots, n, width), E4M3)
    scale = spec((slots, segments, n), jnp.float32)
    first = spec((), jnp.int32)
    run = functools.partial(fp8.fp8_matmul, block_k=BLOCK)
    if name == "e4m3_bf16":
        return lambda x, c, s, i: run(x, c, s, None, i), x, codes, scale, first
    d = spec((x.shape[0], slots, segments), jnp.float32)
    return run, spec(x.shape, E4M3), codes, scale, d, first


def missing():
    """Why kernels cannot be compiled here, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "the CUDA plugin wheels of JAX are not installed"
    for tool in ("ptxas", "nvdisasm"):
        if not any((path / tool).exists() for path in _tool_paths()):
            return f"{tool} is not installed"
    return None


@functools.cache
def compile_all():
    """Every kernel at every shape, compiled in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    cases = json.loads(done.stdout)
    return {tuple(key.split()): Compiled(**value) for key, value in cases.items()}


def compile_for_hopper(function, *specs):
    """Compiles a function that launches one Mosaic kernel for an H200.

    Args:
        function: Traceable function.
        *specs: `jax.ShapeDtypeStruct` of its arguments.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=DEVICE_FACTS.read_text(), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    specs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in specs]
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.dict(os.environ, _environment(folder)):
            traced = jax.jit(function).trace(*specs)
            traced.lower(lowering_platforms=("cuda",)).compile()
        return _read(pathlib.Path(folder))


def _read(folder):
    def text(suffix):
        (path,) = folder.glob(f"*.{suffix}")
        return path.read_text(errors="replace")

    return Compiled(
        text("ptx"), text("sass_ctrl"), text("ptxas"), text("resources.txt")
    )


def _environment(folder):
    dumps = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "SASS", "PTXAS")}
    paths = [*map(str, _tool_paths()), os.environ.get("PATH", "")]
    return {"MOSAIC_GPU_DUMP_TO": folder, "PATH": os.pathsep.join(paths), **dumps}


def _tool_paths():
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return [path for place in places for path in pathlib.Path(place).glob("cu*/bin")]


def main():
    cases = {}
    for name in KERNELS:
        for shape, sizes in SHAPES.items():
            case = compile_for_hopper(*kernel(name, *sizes))
            cases[f"{name} {shape}"] = dataclasses.asdict(case)
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
