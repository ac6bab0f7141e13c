from pathlib import Path

import yaml
from third_party import HOME, lay_out

from export.bundles.check import check_bundle
from export.repair import repair_bundle


def read(bundle: Path) -> dict:
    return yaml.safe_load((bundle / "inference_metadata.yaml").read_text())


def by_name(metadata: dict) -> dict:
    return {entry["name"]: entry for entry in metadata["model"]["io"]["inputs"]}


def test_an_unlisted_input_is_listed_as_the_exporter_itself_lists_it(tmp_path: Path) -> None:
    """The float bundle of the same exporter has the entry; only its dtype words differ."""
    bundle = lay_out("artifact-bf16-default", tmp_path)
    repair_bundle(bundle, tmp_path / "out")
    mended, right = read(tmp_path / "out"), read(HOME / "artifact-f32-default")
    entry, model = by_name(mended)["position_ids"], by_name(right)["position_ids"]
    assert entry == model
    assert list(by_name(mended)) == list(by_name(right))
    assert mended["model"]["io"]["position_ids_input"] == "position_ids"
    codes = {finding.code for finding in check_bundle(tmp_path / "out")}
    assert not codes & {"metadata.inputs", "mtp.hidden"}


def test_all_other_lines_stay_as_they_were(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f16-default-noisy", tmp_path)
    before = (bundle / "inference_metadata.yaml").read_text().splitlines()
    repair = repair_bundle(bundle, bundle)[-1]
    after = (bundle / "inference_metadata.yaml").read_text().splitlines()
    removed = [line for line in repair.difference if line.startswith("-")]
    added = [line for line in repair.difference if line.startswith("+")]
    assert (len(removed), len(added)) == (2, 2 + 7)
    assert len(after) == len(before) + 7


def test_a_listed_input_is_not_listed_again(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    repair_bundle(bundle, tmp_path / "out")
    assert list(by_name(read(tmp_path / "out"))) == list(by_name(read(bundle)))
