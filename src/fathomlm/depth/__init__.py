"""The depth plan: which layer runs at which step, what a step may add, and what it all costs. Pure Python, no torch."""

from fathomlm.depth.architecture import Architecture, LinearSpec, Rope
from fathomlm.depth.exit_parts import ExitParts
from fathomlm.depth.plan import DepthPlan
from fathomlm.depth.relaxation import Relaxation
from fathomlm.depth.routing import Routing, build_routing
from fathomlm.depth.steps import Step

__all__ = [
    "Architecture",
    "DepthPlan",
    "ExitParts",
    "LinearSpec",
    "Relaxation",
    "Rope",
    "Routing",
    "Step",
    "build_routing",
]
