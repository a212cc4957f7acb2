"""Module-name patterns of quantization configs: which modules a list names.

Lists mix four spellings: exact names, bare components (`lm_head`, `gate`), shell globs
and `re:` expressions. Names come with or without `model.` and `language_model.`.
"""

import fnmatch
import re
from collections.abc import Iterable

from jaxtp.errors import CheckpointError

_PREFIXES = ("model", "language_model")

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that models build from several tensors of a checkpoint."""


def canonical(name: str) -> tuple[str, ...]:
    """The components of a module's name without leading `model`, `language_model`."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _PREFIXES:
        parts.pop(0)
    return tuple(parts)


class NamePatterns:
    """A list of patterns, compiled once.

    Patterns that match nothing are no error: exporters list fused and unfused names.

    Args:
        patterns: The entries of a list such as `ignore` or `exclude_modules`.
        what: Where the list stands, for messages.

    Raises:
        CheckpointError: If a `re:` entry is no regular expression.
    """

    def __init__(self, patterns: Iterable[str], what: str = "pattern list") -> None:
        self.patterns = tuple(patterns)
        self._anchored: set[tuple[str, ...]] = set()
        self._floating: set[tuple[str, ...]] = set()
        self._regexes: list[re.Pattern[str]] = []
        globs: list[str] = []
        for pattern in self.patterns:
            if pattern.startswith("re:"):
                self._regexes.append(_compile(pattern, what))
            elif any(c in pattern for c in "*?["):
                globs.append(pattern)
            elif pattern.split(".")[0] in _PREFIXES:
                self._anchored.add(canonical(pattern))
            else:
                self._floating.add(canonical(pattern))
        self._globs = [_compile_globs(globs)] if globs else []

    def __repr__(self) -> str:
        return f"NamePatterns({list(self.patterns)})"

    def matches(self, module: str) -> bool:
        """Whether the list names this module, a module around it, or a fused form.

        A fused module (`qkv_proj`, `gate_up_proj`) is named if the list names it, or
        all its parts; a part is named if the list names it or its fused module.
        """
        if self._matches_itself(module):
            return True
        stem, _, last = module.rpartition(".")
        if last in FUSED:
            return all(self._matches_itself(f"{stem}.{p}") for p in FUSED[last])
        fused = [name for name, parts in FUSED.items() if last in parts]
        return any(self._matches_itself(f"{stem}.{name}") for name in fused)

    def _matches_itself(self, module: str) -> bool:
        parts = canonical(module)
        ends = range(1, len(parts) + 1)
        if any(parts[:stop] in self._anchored for stop in ends):
            return True
        runs = (parts[a:b] for b in ends for a in range(b))
        if self._floating and any(run in self._floating for run in runs):
            return True
        spellings = (module, ".".join(parts))
        return any(
            regex.match(name)
            for regex in (*self._globs, *self._regexes)
            for name in spellings
        )


def _compile(pattern: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise CheckpointError(
            f"{what}: {pattern!r} is no regular expression ({error})."
        ) from None


def _compile_globs(globs: list[str]) -> re.Pattern[str]:
    """One expression for all globs, with and without the leading prefixes.

    A glob also names what lies below the modules it matches. The prefixes stay where a
    wildcard follows: `model.*` does not name `lm_head`.
    """
    spellings = set(globs)
    for pattern in globs:
        bare = ".".join(canonical(pattern))
        if bare[:1] not in "*?[":
            spellings.add(bare)
    below = [f"{pattern}.*" for pattern in spellings]
    return re.compile("|".join(fnmatch.translate(p) for p in (*spellings, *below)))
