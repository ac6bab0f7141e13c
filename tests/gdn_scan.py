"""A Gated-DeltaNet recurrence as portable exporters write it: a scan inside a function."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

HEADS, DK, DV = 3, 4, 5

GDN_TEXT = """
<ir_version: 10, opset_import: ["": 21, "local": 1]>
model (float[T,3,4] q, float[T,3,4] k, float[T,3,5] v, float[T,3] g, float[T,3] beta,
       float[3,4,5] past) => (float[T,3,5] y, float[3,4,5] present) {
  y, present = local.GatedDelta (q, k, v, g, beta, past)
}
<domain: "local", opset_import: ["": 21]>
GatedDelta (q, k, v, g, beta, past) => (y, present) {
  present, y = Scan <num_scan_inputs = 5, body = step (
      float[3,4,5] s, float[3,4] q_t, float[3,4] k_t, float[3,5] v_t, float[3] g_t,
      float[3] beta_t) => (float[3,4,5] s_new, float[3,5] y_t) {
    last = Constant <value = int64[1] {-1}> ()
    middle = Constant <value = int64[1] {1}> ()
    both = Constant <value = int64[2] {1, 2}> ()
    decay = Exp (g_t)
    decay3 = Unsqueeze (decay, both)
    kept = Mul (s, decay3)
    k_row = Unsqueeze (k_t, middle)
    read3 = MatMul (k_row, kept)
    read = Squeeze (read3, middle)
    miss = Sub (v_t, read)
    beta2 = Unsqueeze (beta_t, last)
    delta = Mul (miss, beta2)
    k_column = Unsqueeze (k_t, last)
    delta_row = Unsqueeze (delta, middle)
    written = Mul (k_column, delta_row)
    s_new = Add (kept, written)
    q_row = Unsqueeze (q_t, middle)
    out3 = MatMul (q_row, s_new)
    y_t = Squeeze (out3, middle)
  }> (past, q, k, v, g, beta)
}
"""


def gdn_model(rows: int | None) -> ir.Model:
    """The recurrence as a model, its rows pinned where `rows` is given."""
    model = ir.from_onnx_text(GDN_TEXT)
    if rows is not None:
        for value in (*model.graph.inputs, *model.graph.outputs):
            assert value.shape is not None
            value.shape = ir.Shape([rows if str(d) == "T" else d for d in value.shape])
    return model


def gdn_inputs(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs but `past`, as the oracle wants them: keys normalised, decay a logarithm."""
    keys = rng.standard_normal((rows, HEADS, DK))
    return {
        "q": rng.standard_normal((rows, HEADS, DK)).astype(np.float32),
        "k": (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).astype(np.float32),
        "v": rng.standard_normal((rows, HEADS, DV)).astype(np.float32),
        "g": -rng.random((rows, HEADS)).astype(np.float32),
        "beta": rng.random((rows, HEADS)).astype(np.float32),
    }


def checked(model: ir.Model) -> ir.Model:
    """`model`, past ONNX's full check."""
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def run(model: ir.Model, feeds: dict[str, Any]) -> dict[str, Any]:
    """All outputs on the CPU provider, graph optimisations off: the nodes as they stand."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    proto = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def text(model: ir.Model) -> str:
    """ONNX text, one space between words."""
    return " ".join(onnx.printer.to_text(ir.to_proto(model)).split())
