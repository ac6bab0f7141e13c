"""Graphs whose nodes, attributes, shapes and types were spoiled at random."""

import random
from pathlib import Path

import onnx
import pytest
from third_party import lay_out_whole

from artifacts import ParseError
from export.bundles.check import check_bundle
from export.bundles.describe import inspect_bundle
from export.errors import ExportError
from export.importing import import_bundle

VALUES = ("x", -1, 2**62, 0.5, [1, 2], float("nan"))
SHAPES = ([], [0], [-1], [2**40], [1] * 9, [3, 5])


def spoil(model: onnx.ModelProto, draw: random.Random) -> None:
    graph = model.graph
    node, kind = draw.choice(graph.node), draw.randrange(9)
    if kind == 0 and node.input:
        del node.input[draw.randrange(len(node.input)) :]
    elif kind == 1 and node.output:
        del node.output[draw.randrange(len(node.output)) :]
    elif kind == 2 and node.attribute:
        old = draw.choice(node.attribute)
        node.attribute.append(onnx.helper.make_attribute(old.name, draw.choice(VALUES)))
        node.attribute.remove(old)
    elif kind == 3:
        draw.choice(graph.initializer).dims[:] = draw.choice(SHAPES)
    elif kind == 4:
        node.op_type = draw.choice(["Cast", "Foo", "", "Gather", "Reshape", "Scan", "Split"])
    elif kind == 5 and node.input:
        others = ["", "nothing", graph.input[0].name]
        node.input[draw.randrange(len(node.input))] = draw.choice(others)
    elif kind == 6:
        graph.node.remove(node)
    elif kind == 7:
        draw.choice(graph.initializer).data_type = draw.choice([0, 1, 7, 8, 99, 16, 2])
    elif kind == 8:
        value = draw.choice([*graph.input, *graph.output])
        value.type.tensor_type.ClearField("shape")


@pytest.mark.parametrize("name", ["artifact-f32-default", "oga-fp32-cpu-w0"])
def test_spoiled_graphs_are_refused_and_never_crash(tmp_path: Path, name: str) -> None:
    bundle = lay_out_whole(name, tmp_path)
    graphs = sorted(bundle.rglob("*.onnx"))
    whole = {path: path.read_bytes() for path in graphs}
    refused = 0
    for seed in range(60):
        draw = random.Random(seed)
        path = draw.choice(graphs)
        model = onnx.ModelProto()
        model.ParseFromString(whole[path])
        for _ in range(draw.randint(1, 3)):
            spoil(model, draw)
        path.write_bytes(model.SerializeToString())
        for read in (import_bundle, inspect_bundle, lambda b: check_bundle(b, "cuda")):
            try:
                read(bundle)
            except (ExportError, ParseError):
                refused += read is import_bundle
        path.write_bytes(whole[path])
    assert refused > 40
