from tests.support.graphs.torch_networks import operators_are_listed_once

__all__ = ["operators_are_listed_once"]
