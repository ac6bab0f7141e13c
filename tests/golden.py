"""ONNX text in tests: small graphs in, small graphs compared."""

import onnx
import onnx_ir as ir
import onnxruntime as ort

from passes.contrib import infer_outputs
from passes.streamed import from_array

__all__ = [
    "assert_graph",
    "check",
    "parse",
    "plain",
    "run",
    "typed",
    "unchanged",
    "with_weights",
]

HEADER = (
    '<ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1, "onnx_mtp" : 1, '
    '"elsewhere" : 1]>\n'
)


def parse(text):
    """A model of one graph in ONNX text; the header and what ONNX can infer are added."""
    model = onnx.parser.parse_model(HEADER + text)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def typed(text):
    """`parse` of a graph whose inner values need the types of ``com.microsoft`` too."""
    model = parse(text)
    nodes = [node for node in model.graph if node.domain == "com.microsoft"]
    for index, _ in enumerate(nodes):
        nodes = [node for node in model.graph if node.domain == "com.microsoft"]
        infer_outputs(nodes[index])
        model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
    check(model)
    return model


def with_weights(model, **weights):
    """`model` with inputs turned into initializers that are streamed."""
    graph = model.graph
    for name, array in weights.items():
        value = next(v for v in graph.inputs if v.name == name)
        graph.inputs.remove(value)
        value.const_value = from_array(array, name)
        graph.initializers[name] = value
    return model


def plain(model):
    """Streamed initializers as inputs, to compare graphs; ONNX text knows few names."""
    graph = model.graph
    for value in list(graph.initializers.values()):
        del graph.initializers[value.name]
        value.const_value = None
        value.name = value.name.replace(".", "_").replace("|", "_")
        graph.inputs.append(value)
    return model


def check(model):
    """The full checker on what would be written."""
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def assert_graph(model, text):
    """`model` is the graph of `text` but for the names of nodes and inner values."""
    assert _shown(model) == _shown(parse(text))


def unchanged(pass_, model):
    """Whether a call leaves the model byte for byte as it is, and says so."""
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    result = pass_(model)
    after = ir.to_proto(result.model).SerializeToString(deterministic=True)
    return before == after and not result.modified and pass_.changes == 0


def run(model, **feeds):
    """All outputs by name, on ONNX Runtime's CPU provider without its optimiser."""
    check(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _shown(model):
    """The graph as lines; inner values are numbered in the order they are made."""
    graph = ir.to_proto(model).graph
    graph.name = "g"
    del graph.value_info[:]
    kept = {v.name for v in (*graph.input, *graph.output, *graph.initializer)} | {""}
    numbers = {}
    for node in graph.node:
        node.name = ""
        del node.metadata_props[:]
        for name in node.output:
            if name not in kept:
                numbers[name] = f"t{len(numbers)}"
        node.input[:] = [numbers.get(name, name) for name in node.input]
        node.output[:] = [numbers.get(name, name) for name in node.output]
        node.doc_string = ""
        for attribute in node.attribute:
            attribute.t.name = "" if attribute.HasField("t") else attribute.t.name
        attributes = sorted(node.attribute, key=lambda attribute: attribute.name)
        del node.attribute[:]
        node.attribute.extend(attributes)
    return onnx.printer.to_text(graph).splitlines()
