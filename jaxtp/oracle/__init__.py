"""The host-bounce oracle: rank by rank on one device, moved and added in NumPy.

The names are those of the device functions. Everything between the rank-local kernels
and the result is NumPy: no mesh, no collective, no compiler in between.
"""

from jaxtp.oracle.bounce import column_parallel as column_parallel
from jaxtp.oracle.bounce import project as project
from jaxtp.oracle.bounce import row_parallel as row_parallel
from jaxtp.oracle.bounce import slot_partials as slot_partials
from jaxtp.oracle.bounce import sum_slots as sum_slots
from jaxtp.oracle.moe import combine_routes as combine_routes
from jaxtp.oracle.moe import expert_csr as expert_csr
from jaxtp.oracle.moe import exponential as exponential
from jaxtp.oracle.moe import group_routes as group_routes
from jaxtp.oracle.moe import moe_residual as moe_residual
from jaxtp.oracle.moe import partition_by_owner as partition_by_owner
from jaxtp.oracle.moe import swiglu as swiglu
from jaxtp.oracle.ordered import nvfp4_int8_partials as nvfp4_int8_partials
from jaxtp.oracle.router import route as route
from jaxtp.oracle.router import route_weights as route_weights
from jaxtp.oracle.router import router_logits as router_logits
from jaxtp.oracle.router import score_experts as score_experts
from jaxtp.oracle.router import select_experts as select_experts
from jaxtp.oracle.value import depth as depth
from jaxtp.oracle.value import float64 as float64
from jaxtp.oracle.value import quantized_activation as quantized_activation
