"""The operators of a backbone whose work can depend on the values of an image. Pure.

A private device refuses them: the time of a run would answer questions about single images. Work means the number of
steps, and so shapes; that a processor may add some numbers faster than others remains. docs/adr/0089 has measurements.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from protocol.models.onnx_validation import message_fields, text_of

_NAMES = (
    # Elementwise
    "Abs Add And Atan BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu Clip Div "
    "Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity "
    "IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow "
    "Reciprocal Relu Round Selu Sigmoid Sign Softplus Softsign Sqrt Sub Sum Swish Tanh "
    "ThresholdedRelu Where Xor "
    # Products, convolutions and recurrent layers
    "Conv ConvInteger ConvTranspose DequantizeLinear DynamicQuantizeLinear Einsum GRU Gemm LSTM "
    "MatMul MatMulInteger QLinearConv QLinearMatMul QuantizeLinear RNN "
    # Reductions, pooling and normalization
    "ArgMax ArgMin AveragePool BatchNormalization CumSum GlobalAveragePool GlobalLpPool "
    "GlobalMaxPool GroupNormalization InstanceNormalization LRN LayerNormalization LogSoftmax "
    "LpNormalization LpPool MaxPool MeanVarianceNormalization RMSNormalization ReduceL1 ReduceL2 "
    "ReduceLogSum ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Softmax "
    # Shapes and places
    "Col2Im Concat ConstantOfShape DepthToSpace Expand EyeLike Flatten Gather GatherElements GatherND "
    "OneHot Pad Range Reshape Resize ScatterElements ScatterND Shape Size Slice SpaceToDepth Split "
    "Squeeze Tile Transpose Trilu Unsqueeze Upsample "
)
STEADY = frozenset(_NAMES.split())
"""Operators that take the same steps for tensors of the same shapes; any other one counts as one that does not.

Without them are, with the factor between tensors of one shape in ONNX Runtime 1.31: ReduceLogSumExp 48, TopK 9, Asinh
8, Tan 8, Atanh 7, Sinh 5, Hardmax 4, Sin 4, Acosh 3, Cos 3, Cosh 3.
"""

_PUBLIC_INPUTS: Mapping[str, tuple[int, ...]] = {
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "GRU": (4,),
    "LSTM": (4,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Pow": (1,),
    "RNN": (4,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
} | {name: (1,) for name in STEADY if name.startswith("Reduce")}
"""Inputs whose values are shapes, places or counts, and so the operator's work."""

_SHAPES = frozenset({"Shape", "Size"})
"""Operators whose outputs depend on shapes only: as long as no shape depends on values, these do not either."""

_STRING = 8
"""The number of the type whose values have lengths of their own."""

_NODE, _INITIALIZER, _INPUT, _GRAPH, _FUNCTION = 1, 5, 11, 7, 25
"""Numbers of fields, of a graph and of a model."""

_INTEGER, _TENSOR, _TEXTS, _SUBGRAPHS = 3, 5, (4, 9), (6, 11)
"""Numbers of an attribute's fields. Every occurrence counts, as readers merge them."""


@dataclass(frozen=True)
class _Node:
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[tuple[int, int | memoryview], ...], ...]


def unsteady_operators(file: bytes | memoryview) -> tuple[str, ...]:
    """Return the operators of an ONNX file whose work can depend on an image, sorted; the file was validated before.

    Those are the operators outside of `STEADY`, and operators with a shape that is computed from values of the image.
    An operator on constants and shapes alone does the same for all images, whichever it is. Subgraphs, local functions
    and strings are always named: `(function)`, `(string)`.
    """
    found: set[str] = set()
    public: set[str] = {""}  # an input that is left out
    model = list(message_fields(memoryview(file)))
    if any(number == _FUNCTION for number, _ in model):
        found.add("(function)")
    graph = [field for number, value in model if number == _GRAPH for field in message_fields(_bytes(value))]
    for number, value in graph:
        if number == _INITIALIZER:
            public.add(_last_text(_bytes(value), 8))
            found.update(_strings(_bytes(value)))
    public -= {_last_text(_bytes(value), 1) for number, value in graph if number == _INPUT}
    for number, value in graph:
        if number == _NODE:
            node = _read(_bytes(value))
            found.update(_unsteady(node, public))
            if node.operator in _SHAPES or public.issuperset(node.inputs):
                public.update(node.outputs)
            else:
                public.difference_update(node.outputs)
    return tuple(sorted(found))


def _unsteady(node: _Node, public: set[str]) -> Iterator[str]:
    for number, value in itertools.chain.from_iterable(node.attributes):
        if number in _SUBGRAPHS:  # one reads any tensor of the graph around it
            yield node.operator
        elif isinstance(value, memoryview) and number == _TENSOR:
            yield from _strings(value)
        elif (node.operator, number, value) == ("Cast", _INTEGER, _STRING) or (
            node.operator == "Constant" and number in _TEXTS
        ):
            yield "(string)"
    if public.issuperset(node.inputs):
        return
    shapes = _PUBLIC_INPUTS.get(node.operator, ())
    if node.operator not in STEADY or any(
        name not in public for index, name in enumerate(node.inputs) if index in shapes
    ):
        yield node.operator


def _read(node: memoryview) -> _Node:
    inputs, outputs, operators, attributes = list[str](), list[str](), list[str](), []
    for number, value in message_fields(node):
        if number == 1:
            inputs.append(text_of(value))
        elif number == 2:
            outputs.append(text_of(value))
        elif number == 4:
            operators.append(text_of(value))
        elif number == 5:
            attributes.append(tuple(message_fields(_bytes(value))))
    return _Node(" ".join(dict.fromkeys(operators)), tuple(inputs), tuple(outputs), tuple(attributes))


def _last_text(message: memoryview, field: int) -> str:
    """Return the last occurrence of a field, which is the one that counts."""
    return next(
        (text_of(value) for number, value in reversed([*message_fields(message)]) if number == field), ""
    )


def _strings(tensor: memoryview) -> Iterable[str]:
    is_string = any(number == 2 and value == _STRING for number, value in message_fields(tensor))
    return ("(string)",) if is_string else ()


def _bytes(value: int | memoryview) -> memoryview:
    return value if isinstance(value, memoryview) else memoryview(b"")
