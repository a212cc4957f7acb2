"""Weights as the checkpoint has them: codes, scales, and how to decode them.

A weight is `[N, K]` (out features, in features); a leading E axis makes it a bank of
experts. Parts may be NumPy arrays, JAX arrays, or lazily read checkpoint tensors (see
`HostArray`); nothing here reads them until `dequantize`, `place` or an oracle does.
"""

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float32

from jaxtp import formats
from jaxtp.errors import DtypeError, FormatError, ShapeError
from jaxtp.plan import SLOT_QUANTUM

GlobalScaleKind = Literal["multiplier", "divisor"]


@runtime_checkable
class HostArray(Protocol):
    """What a part of a weight must offer: NumPy, JAX and lazy tensors all do."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        ...

    @property
    def dtype(self) -> Any:
        """NumPy or ml_dtypes dtype of the elements."""
        ...

    def __getitem__(self, index: Any, /) -> Any: ...


class _Weight:
    """Common accessors of the three weight records."""

    format: str

    def _parts(self) -> dict[str, Any]:
        """The array fields by name."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
            if not f.metadata.get("static")
        }

    @property
    def is_bank(self) -> bool:
        """Whether the weight has a leading expert axis."""
        return len(self.shape) == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, `(N, K)` or `(E, N, K)`."""
        raise NotImplementedError

    def expert(self, index: int) -> Any:
        """The `[N, K]` weight of one expert of a bank.

        Raises:
            ShapeError: If this is no bank, or it has no such expert.
        """
        if not self.is_bank:
            raise ShapeError(f"a weight of shape {self.shape} has no expert axis.")
        if not isinstance(index, int) or not 0 <= index < self.shape[0]:
            raise ShapeError(
                f"expert index must lie in [0, {self.shape[0]}); got {index}."
            )
        parts = {name: part[index] for name, part in self._parts().items()}
        return dataclasses.replace(self, **parts)  # pyright: ignore[reportArgumentType]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bf16Weight(_Weight):
    """A bf16 matrix `[N, K]`, or a bank `[E, N, K]`.

    Attributes:
        value: bfloat16.
    """

    value: Any

    format = "bf16"

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, `(N, K)` or `(E, N, K)`."""
        return tuple(self.value.shape)

    def dequantize(self) -> Float32[Array, "*E N K"] | np.ndarray:
        """The weight in float32, exactly.

        Bits:
            ORDERED: the same words from NumPy and JAX parts.
        """
        return _resolve(self.value).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Weight(_Weight):
    """E4M3 codes with one float32 scale (a multiplier) for each 2-D block.

    `w[n, k] = RN(code[n, k] * scale[n // block_shape[0], k // block_shape[1]])`.

    Attributes:
        code: float8_e4m3fn `[N, K]` or `[E, N, K]`.
        scale: float32 `[ceil(N / bn), ceil(K / bk)]`, with E in front for a bank.
        block_shape: `(bn, bk)` from the checkpoint's config; never inferred.
    """

    code: Any
    scale: Any
    block_shape: tuple[int, int] = dataclasses.field(
        default=(128, 128), metadata={"static": True}
    )

    format = "e4m3"

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, `(N, K)` or `(E, N, K)`."""
        return tuple(self.code.shape)

    def dequantize(self) -> Float32[Array, "*E N K"] | np.ndarray:
        """The decoded weight: one float32 product, rounded once.

        Raises:
            FormatError: If the parts contradict each other.

        Bits:
            ORDERED: the same words from NumPy and JAX parts. -0 is kept; NaN codes
            and scales propagate.
        """
        validate(self)
        return formats.dequantize_fp8_block(
            _resolve(self.code), _resolve(self.scale), self.block_shape
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nvfp4Weight(_Weight):
    """NVFP4: E2M1 codes, one E4M3 scale for 16 columns, one float32 scale for all.

    `w = RN(code * RN(scale * global_scale))`, or `RN(scale / global_scale)` inside
    when the global scale is a divisor (compressed-tensors).

    Attributes:
        code: uint8 `[N, K/2]`; the low nibble is the even column.
        scale: float8_e4m3fn `[N, K/16]`, linear (not swizzled).
        global_scale: float32 `[]`, or `[E]` for a bank.
        global_scale_kind: `"multiplier"` (modelopt) or `"divisor"`.
    """

    code: Any
    scale: Any
    global_scale: Any
    global_scale_kind: GlobalScaleKind = dataclasses.field(
        default="multiplier", metadata={"static": True}
    )

    format = "nvfp4"

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, `(N, K)` or `(E, N, K)`."""
        *lead, packed = self.code.shape
        return (*lead, 2 * packed)

    def dequantize(self) -> Float32[Array, "*E N K"] | np.ndarray:
        """The decoded weight in float32, global scale included.

        Raises:
            FormatError: If the parts contradict each other.

        Bits:
            ORDERED: the same words from NumPy and JAX parts. Code 8 is -0.
        """
        validate(self)
        return formats.dequantize_nvfp4(
            _resolve(self.code),
            _resolve(self.scale),
            _resolve(self.global_scale),
            self.global_scale_kind,
        )


Weight = Bf16Weight | Fp8Weight | Nvfp4Weight


def _resolve(part: Any) -> Any:
    return part if isinstance(part, jax.Array) else np.asarray(part)


def _check_dtype(name: str, part: Any, dtype: Any) -> None:
    if np.dtype(part.dtype) != np.dtype(dtype):
        raise DtypeError(
            f"`{name}` must be {np.dtype(dtype).name}; got {np.dtype(part.dtype).name}."
        )


def _check_shape(name: str, part: Any, expected: tuple[int, ...], why: str) -> None:
    if tuple(part.shape) != expected:
        raise ShapeError(
            f"`{name}` must have shape {expected} ({why}); got {tuple(part.shape)}."
        )


def validate(weight: Weight) -> None:
    """Checks dtypes and shapes of a weight's parts against each other.

    Values are not read: scales and codes are checked where they are first read.

    Raises:
        DtypeError: If a part has another dtype than its format says.
        ShapeError: If shapes do not fit each other, or K is no multiple of 16 (NVFP4).
        FormatError: If a block shape or a global-scale kind cannot be used.
        TypeError: If `weight` is no weight.
    """
    if not isinstance(weight, Weight):
        raise DtypeError(
            "expected a Bf16Weight, Fp8Weight or Nvfp4Weight; got "
            f"{type(weight).__name__}."
        )
    for name, part in weight._parts().items():
        if not hasattr(part, "dtype") or not hasattr(part, "shape"):
            raise DtypeError(
                f"`{name}` must be an array; got {part!r}, a {type(part).__name__}."
            )
    main = weight.value if isinstance(weight, Bf16Weight) else weight.code
    if len(main.shape) not in (2, 3) or 0 in main.shape:
        raise ShapeError(
            "a weight is [N, K] or [E, N, K] with no empty axis; got shape "
            f"{tuple(main.shape)}."
        )
    *lead, n, k = weight.shape
    if isinstance(weight, Bf16Weight):
        _check_dtype("value", weight.value, ml_dtypes.bfloat16)
    elif isinstance(weight, Fp8Weight):
        _validate_fp8(weight, tuple(lead), n, k)
    else:
        _validate_nvfp4(weight, tuple(lead), n, k)


def _validate_fp8(w: Fp8Weight, lead: tuple[int, ...], n: int, k: int) -> None:
    _check_dtype("code", w.code, ml_dtypes.float8_e4m3fn)
    _check_dtype("scale", w.scale, np.float32)
    shape = w.block_shape
    if not isinstance(shape, tuple) or [type(b) for b in shape] != [int, int]:
        raise FormatError(f"`block_shape` must be a tuple of two ints; got {shape!r}.")
    bn, bk = shape
    if bn < 1 or bk < SLOT_QUANTUM or bk % SLOT_QUANTUM:
        raise FormatError(
            f"`block_shape` must be (rows >= 1, a multiple of {SLOT_QUANTUM} columns); "
            f"got {w.block_shape}."
        )
    expected = (*lead, -(-n // bn), -(-k // bk))
    _check_shape("scale", w.scale, expected, f"blocks of {bn} x {bk} over {n} x {k}")


def _validate_nvfp4(w: Nvfp4Weight, lead: tuple[int, ...], n: int, k: int) -> None:
    _check_dtype("code", w.code, np.uint8)
    _check_dtype("scale", w.scale, ml_dtypes.float8_e4m3fn)
    _check_dtype("global_scale", w.global_scale, np.float32)
    if w.global_scale_kind not in ("multiplier", "divisor"):
        raise FormatError(
            "`global_scale_kind` must be 'multiplier' or 'divisor'; got "
            f"{w.global_scale_kind!r}."
        )
    if k % 16:
        raise ShapeError(f"NVFP4 needs K to be a multiple of 16; got K={k}.")
    _check_shape("scale", w.scale, (*lead, n, k // 16), f"groups of 16 over K={k}")
    _check_shape("global_scale", w.global_scale, lead, "one scalar for each matrix")
