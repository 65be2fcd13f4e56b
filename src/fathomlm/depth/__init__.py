"""The depth plan: which layer runs at which step, what a step may add, and what it all costs. Pure Python, no torch."""

from fathomlm.depth.architecture import Architecture, LinearSpec, Rope
from fathomlm.depth.plan import DepthPlan, ExitParts, Step
from fathomlm.depth.relaxation import Relaxation
from fathomlm.depth.routing import Routing, build_routing

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
