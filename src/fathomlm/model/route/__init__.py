"""Routers: what gives each token its depth (thesis 4.3.2). `depth.routing` names the kinds."""

from fathomlm.model.route.routers import RoutedWalk, Routers, build_routers, routers_of
from fathomlm.model.route.trace import DepthControl, RoutingTrace, TopKOptions

__all__ = ["DepthControl", "RoutedWalk", "Routers", "RoutingTrace", "TopKOptions", "build_routers", "routers_of"]
