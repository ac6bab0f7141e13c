"""DropIdentityPass: names of outputs stay, all other renamings go."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from gdn_scan import checked, run, text

from passes.drop_identity import DropIdentityPass

HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def drop(source: str, changes: int) -> ir.Model:
    model = ir.from_onnx_text(HEAD + source)
    step = DropIdentityPass()
    assert step(model).modified is bool(changes)
    assert step.changes == changes
    assert not step(model).modified  # a second run changes nothing
    return checked(model)


def test_a_renaming_goes_and_an_output_keeps_its_name() -> None:
    got = drop(
        """
g (float[2] x) => (float[2] y, float[2] z) {
  t = Exp (x)
  u = Identity (t)
  y = Neg (u)
  z = Identity (t)
}""",
        changes=2,
    )
    golden = """
g (float[2] x) => (float[2] y, float[2] z) {
  z = Exp (x)
  y = Neg (z)
}"""
    assert [n.op_type for n in got.graph] == ["Exp", "Neg"]
    assert text(got).endswith(text(ir.from_onnx_text(HEAD + golden)).split(">", 1)[1].strip())


def test_two_outputs_of_one_value_keep_both_names() -> None:
    got = drop(
        """
g (float[2] x) => (float[2] y, float[2] z) {
  t = Neg (x) y = Identity (t) z = Identity (t) }""",
        changes=1,
    )
    result = run(got, {"x": np.float32([1, 2])})
    assert list(result) == ["y", "z"]
    np.testing.assert_array_equal(result["z"], np.float32([-1, -2]))


@pytest.mark.parametrize(
    "source",
    [
        "g (float[2] x) => (float[2] y) { y = Identity (x) }",
        "g () => (float[2] y) <float[2] w = {1, 2}> { y = Identity (w) }",
        """g (bool c, float[2] x) => (float[2] y) {
          t = Exp (x)
          y = If (c) <then_branch = a () => (float[2] u) { u = Identity (t) },
                      else_branch = b () => (float[2] v) { v = Neg (t) }>
        }""",
    ],
    ids=["an input", "an initializer", "an outer value"],
)
def test_an_output_that_is_made_elsewhere_keeps_its_identity(source: str) -> None:
    drop(source, changes=0)
