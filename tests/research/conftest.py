from tests.support.graphs.onnx_exporter import operators_are_listed_once

__all__ = ["operators_are_listed_once"]
