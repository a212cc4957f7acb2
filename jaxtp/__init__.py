"""Tensor-parallel projections for JAX, with the same words on every mesh."""

from jaxtp import checkpoint as checkpoint
from jaxtp import formats as formats
from jaxtp import oracle as oracle
from jaxtp import testing as testing
from jaxtp import transport as transport
from jaxtp.activation import swiglu as swiglu
from jaxtp.errors import JaxtpError as JaxtpError
from jaxtp.experts import combine_routes as combine_routes
from jaxtp.experts import moe_residual as moe_residual
from jaxtp.local_projection import column_parallel_local as column_parallel_local
from jaxtp.local_projection import row_parallel_local as row_parallel_local
from jaxtp.placement import PlacedWeight as PlacedWeight
from jaxtp.placement import make_mesh as make_mesh
from jaxtp.placement import place as place
from jaxtp.plan import ReductionPlan as ReductionPlan
from jaxtp.plan import SlotLayout as SlotLayout
from jaxtp.projection import column_parallel as column_parallel
from jaxtp.projection import project as project
from jaxtp.projection import row_parallel as row_parallel
from jaxtp.reduction import ordered_sum as ordered_sum
from jaxtp.router import route as route
from jaxtp.router import router_logits as router_logits
from jaxtp.router_config import RouterConfig as RouterConfig
from jaxtp.router_config import Routes as Routes
from jaxtp.weights import Bf16Weight as Bf16Weight
from jaxtp.weights import Fp8Weight as Fp8Weight
from jaxtp.weights import Nvfp4Weight as Nvfp4Weight

__version__ = "0.1.0"
