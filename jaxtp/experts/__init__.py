"""Experts: which token rows each one takes, and how their results are added."""

from jaxtp.experts.combine import combine_routes as combine_routes
from jaxtp.experts.combine import moe_residual as moe_residual
from jaxtp.experts.grouping import ExpertCsr as ExpertCsr
from jaxtp.experts.grouping import Grouping as Grouping
from jaxtp.experts.grouping import OwnerPart as OwnerPart
from jaxtp.experts.grouping import expert_csr as expert_csr
from jaxtp.experts.grouping import group_routes as group_routes
from jaxtp.experts.grouping import partition_by_owner as partition_by_owner
