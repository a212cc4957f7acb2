"""Checkpoints: safetensors folders in, weights with lazily read parts out."""

from jaxtp.checkpoint.config import Quantization as Quantization
from jaxtp.checkpoint.config import Scheme as Scheme
from jaxtp.checkpoint.lazy import LazyStack as LazyStack
from jaxtp.checkpoint.lazy import LazyTensor as LazyTensor
from jaxtp.checkpoint.reader import Checkpoint as Checkpoint
from jaxtp.checkpoint.reader import open as open
from jaxtp.checkpoint.report import COLUMNS as COLUMNS
from jaxtp.checkpoint.report import Problem as Problem
from jaxtp.checkpoint.report import Report as Report
from jaxtp.checkpoint.report import Row as Row
from jaxtp.checkpoint.writer import save as save
from jaxtp.checkpoint.writer import write_file as write_file
