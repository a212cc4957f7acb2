"""What a sweep was asked for, and what it found."""

import dataclasses

from jaxtp.plan import ReductionPlan
from pallas_kernels import Implementation


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is common to all cases.

    Attributes:
        meshes: Sizes of the "tp" axis, ascending. The first is the reference.
        plans: Plans with one number of slots.
        max_tokens: Rows that are drawn; a case takes the first of them.
        seed: Of the activations.
        implementation: "mosaic", "portable" or None.
    """

    meshes: tuple[int, ...]
    plans: tuple[ReductionPlan, ...]
    max_tokens: int
    seed: int = 0
    implementation: Implementation | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """One matrix under one plan on all meshes.

    Attributes:
        format: "bf16", "e4m3" or "nvfp4".
        activation: The activation mode.
        operation: "row" or "column".
        tensor: Name of the matrix.
        shape: `(N, K)`.
        order: The plan's order.
        tokens: T.
        digests: SHA-256 of the float32 words on each mesh, first twelve digits.
        same_on_meshes: Whether the words on every mesh are those of the first.
        same_as_oracle: Whether the words on every mesh are the oracle's.
        error_over_bound: Worst error against float64, as a part of its bound.
        milliseconds: One run of the program with all plans, on each mesh.
        psum_changed: Part of the words that the psum version changes on each mesh
            against the first; None for "column", which adds nothing across ranks.
    """

    format: str
    activation: str
    operation: str
    tensor: str
    shape: tuple[int, ...]
    order: str
    tokens: int
    digests: tuple[str, ...]
    same_on_meshes: bool
    same_as_oracle: bool
    error_over_bound: float
    milliseconds: tuple[float, ...]
    psum_changed: tuple[float, ...] | None

    @property
    def ok(self) -> bool:
        """Whether words and error are what they must be."""
        bounded = self.error_over_bound <= 1.0
        return self.same_on_meshes and self.same_as_oracle and bounded


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All results, and what they cover.

    Attributes:
        settings: What is common to them.
        device: Kind of the devices.
        notes: What is covered, and what was left out.
        results: One for each matrix, activation, operation, plan and T that ran.
        seconds: The whole time.
    """

    settings: Settings
    device: str
    notes: tuple[str, ...]
    results: tuple[Result, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every result is what it must be."""
        return all(result.ok for result in self.results)

    @property
    def psum_changed(self) -> float | None:
        """Part of all words that psum changes on meshes beyond the first."""
        parts = [
            (fraction, r.tokens * r.shape[0])
            for r in self.results
            for fraction in (r.psum_changed or ())[1:]
        ]
        words = sum(count for _, count in parts)
        return sum(f * count for f, count in parts) / words if words else None

    @property
    def summary(self) -> str:
        """One line for the end of the output."""
        total = len(self.results)
        bad = sum(not result.ok for result in self.results)
        changed = self.psum_changed
        control = (
            "psum was not compared (it needs a row projection and two meshes)"
            if changed is None
            else f"psum changes {100 * changed:.1f} % of the words"
        )
        if bad:
            return f"{bad} of {total} results FAILED; {control}"
        return (
            f"all {total} results equal on every mesh and equal to the oracle; "
            f"{control}"
        )
