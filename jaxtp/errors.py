"""Typed errors. Each names the argument or tensor, what was found, and a remedy.

Every error is also a `ValueError`, a `TypeError` or a `NotImplementedError`, so code
that does not know `jaxtp` can still catch it.
"""


class JaxtpError(Exception):
    """Base of every error that `jaxtp` raises on purpose."""


class ShapeError(JaxtpError, ValueError):
    """An array has a shape, or a rank, that the call cannot take."""


class DtypeError(JaxtpError, TypeError):
    """An array has a dtype that the call cannot take."""


class PlanError(JaxtpError, ValueError):
    """A reduction plan is malformed, or does not fit the weight or the mesh."""


class PlanTypeError(JaxtpError, TypeError):
    """A reduction plan does not exist for this kind of weight."""


class MeshError(JaxtpError, ValueError):
    """A mesh, an axis name or an axis size does not fit the call."""


class ActivationError(JaxtpError, ValueError):
    """An activation mode is missing, or unknown for this weight format."""


class ConfigError(JaxtpError, ValueError):
    """A static option, such as a clamp limit or a top-k, is out of its range."""


class ExpertError(JaxtpError, ValueError):
    """An expert id, a selection bias or an active mask does not fit the experts."""


class FormatError(JaxtpError, ValueError):
    """A quantized weight's parts contradict each other."""


class NonFiniteError(FormatError):
    """A scale or a code is NaN, infinite, or has a sign it must not have."""


class CheckpointError(JaxtpError, ValueError):
    """A checkpoint cannot be read as what its config says it is."""


class CorruptFileError(CheckpointError):
    """A file's bytes contradict its own header."""


class MissingTensorError(CheckpointError):
    """A tensor, or a companion that a quantized tensor needs, is absent."""


class LeftoverTensorError(CheckpointError):
    """A companion tensor belongs to nothing that was loaded."""


class UnsupportedError(JaxtpError, NotImplementedError):
    """A valid request that this build cannot run where it was asked to."""
