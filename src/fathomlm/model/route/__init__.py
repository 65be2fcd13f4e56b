"""Routers: what gives each token its depth (thesis 4.3.2)."""

from fathomlm.model.route.routers import Routers, build_routers
from fathomlm.model.route.trace import DepthControl, RoutingTrace, TopKOptions
from fathomlm.model.route.walk import RoutedWalk

__all__ = ["DepthControl", "RoutedWalk", "Routers", "RoutingTrace", "TopKOptions", "build_routers"]
