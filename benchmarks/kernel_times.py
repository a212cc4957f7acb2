"""Kernel times by CUPTI with a cold L2, against XLA's bf16 dot and a device copy.

The pass that empties the L2 only reads. After one that writes, the cache is full of
lines that the timed kernel must first send to memory: five microseconds of a small one.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import kernel_cases as cases
from jax import lax

SLOTS = 8
SHAPES = ((4096, 4096), (8192, 8192), (16384, 8192))
FLUSH_BYTES = 512 << 20
ITERATIONS = 10


def weight_bytes(name, n, k):
    """Bytes of a weight that every decode step must read."""
    if name.startswith("e4m3"):
        return n * k + n * k * 4 / cases.BLOCK**2
    if name.startswith("nvfp4"):
        return n * k * (0.5 + 1 / 16)
    return 2 * n * k


def measure_all(times, deadline, programs=cases.PROGRAMS):
    """Appends one record a (program, shape, T) until the deadline."""
    copy = copy_rate()
    times.append({"program": "copy", "gb_s": round(copy / 1e9)})
    wanted = [(n, k, 8) for n, k in SHAPES]
    wanted += [(4096, 4096, 1), *((8192, 8192, t) for t in (16, 32, 64))]
    wanted += [(4096, 4096, 1024)]
    skipped = 0
    for n, k, tokens in wanted:
        for name in ("xla_bf16", *programs):
            if time.monotonic() > deadline:
                skipped += 1
                continue
            times.append(_record(name, n, k, tokens, copy))
    return f"{len(times)} records, {skipped} left out for want of time"


def copy_rate():
    """Bytes a second of a device copy, read and write counted."""
    x = jnp.ones(FLUSH_BYTES // 4, jnp.float32)
    samples = _samples(jax.jit(lambda a: a + jnp.float32(1)), x)
    seconds = statistics.median(sum(ms for _, ms in run) for run in samples) * 1e-3
    return 2 * FLUSH_BYTES / seconds


def _record(name, n, k, tokens, copy):
    entry = {"program": name, "n": n, "k": k, "t": tokens}
    try:
        kernel, total, names = _time(name, n, k, tokens)
    except Exception as error:
        return {**entry, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    share = weight_bytes(name, n, k) / (total * 1e-6) / copy
    return {
        **entry,
        "kernel_us": round(kernel, 2),
        "total_us": round(total, 2),
        "share_of_copy": round(share, 3),
        "kernels": names,
    }


def _time(name, n, k, tokens):
    """Median microseconds of the longest kernel and of all, with their names."""
    x, weight = _operands(name, n, k, tokens)

    if name == "xla_bf16":

        def run(x, weight):
            dims = (((1,), (1,)), ((), ()))
            return lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32)

    else:
        program = cases.program(name, "mosaic")

        def run(x, weight):
            return program(x, weight, jnp.int32(0))

    @jax.jit
    def with_flush(flush, x, weight):
        read, x, weight = lax.optimization_barrier((_read(flush), x, weight))
        return read, run(x, weight)

    flush = jnp.ones(FLUSH_BYTES // 4, jnp.float32)
    skip = len(_samples(jax.jit(_read), flush)[0])
    runs = [samples[skip:] for samples in _samples(with_flush, flush, x, weight)]
    kernel = statistics.median(max(ms for _, ms in run) for run in runs)
    total = statistics.median(sum(ms for _, ms in run) for run in runs)
    return kernel * 1e3, total * 1e3, [kernel_name[:60] for kernel_name, _ in runs[0]]


def _read(flush):
    return jnp.sum(flush)


def _samples(function, *args):
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.measure(function, aggregate=False, iterations=ITERATIONS)
    return measured(*args)[1]


@functools.lru_cache(maxsize=2)
def _normal(rows, columns, seed):
    shape = (rows, columns)
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(
        jax.random.key(seed)
    )


def _operands(name, n, k, tokens):
    x, w = _normal(tokens, k, 0), _normal(n, k, 1)
    if name == "xla_bf16":
        return x, w
    slots = w.reshape(n, SLOTS, -1).transpose(1, 0, 2)
    if name == "bf16":
        return (x,), (slots,)
    if name.startswith("e4m3"):
        segments = k // SLOTS // cases.BLOCK
        scale = 1 + jnp.abs(_normal(SLOTS * segments, n, 2)).astype(jnp.float32)
        weight = slots.astype(jnp.float8_e4m3fn), scale.reshape(SLOTS, segments, n)
        if name == "e4m3_bf16":
            return (x,), weight
        d = jnp.full((tokens, SLOTS, segments), 0.01, jnp.float32)
        return (x.astype(jnp.float8_e4m3fn), d), weight
    bits = lax.bitcast_convert_type(slots[..., : k // SLOTS // 2], jnp.uint16)
    code = (bits & jnp.uint16(255)).astype(jnp.uint8)
    scale = 1 + jnp.abs(slots[..., : k // SLOTS // 16])
    weight = code, scale.astype(jnp.float8_e4m3fn)
    if name == "nvfp4_bf16":
        return (x,), weight
    q = jnp.round(x.astype(jnp.float32) * 30).astype(jnp.int8)
    return (q, jnp.full((tokens, k // 32), 0.01, jnp.float32)), weight


def print_table(times):
    for entry in times:
        if entry["program"] == "copy":
            print(f"device copy {entry['gb_s']} GB/s")
        elif "error" in entry:
            print(f"{entry['program']:>11} {entry['error'][:200]}")
        else:
            shape = f"{entry['n']} x {entry['k']}, T = {entry['t']}"
            print(
                f"{entry['program']:>11} {shape:<24}"
                f" kernel {entry['kernel_us']:>9.2f} us"
                f" all {entry['total_us']:>9.2f} us"
                f" {100 * entry['share_of_copy']:>5.1f} % of copy"
            )
