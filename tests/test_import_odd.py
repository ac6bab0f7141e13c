from pathlib import Path

import numpy as np
from odd_bundle import SIZES, write_odd_bundle

from export.importing import import_bundle


def test_forms_and_sizes_that_no_fixture_has(tmp_path: Path) -> None:
    expected = write_odd_bundle(tmp_path / "odd")
    model = import_bundle(tmp_path / "odd")
    spec, s = model.spec, SIZES
    assert [str(kind) for kind in spec.layers] == ["gdn", "attention"]
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (40, 56, 72)
    a, g = spec.attention, spec.gdn
    assert (a.query_heads, a.kv_heads, a.head_dim, a.rotary_dim) == (6, 3, 32, 16)
    assert (a.rope_theta, spec.rms_norm_eps) == (s["theta"], s["eps"])
    assert (g.key_heads, g.value_heads, g.key_dim, g.value_dim) == (2, 4, 16, 24)
    assert (g.conv_kernel, g.output_gate) == (5, "sigmoid")
    assert spec.tied_embedding and spec.head is None and spec.max_positions == 128
    assert model.weights.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(model.weights[name].numpy(), array, err_msg=name)
