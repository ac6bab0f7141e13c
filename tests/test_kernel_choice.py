"""Which kernels an artifact runs with; loads of either kind: test_cuda_fallback.py."""

import dataclasses
import logging
import re

import pytest
from artifact_samples import write_sample

from artifacts import Fallback, Target
from runtime.errors import KernelError
from runtime.kernels import choice
from runtime.kernels.choice import choose_kernels

HOPPER = (9, 0)


@pytest.fixture
def manifest(tmp_path):
    """The sample as if it were for own kernels, with a fallback for each graph."""
    found = write_sample(tmp_path)
    graphs = {
        name: dataclasses.replace(
            graph, fallback=Fallback(file=f"{name}.stock.onnx", sha256="0", weights=("mix",))
        )
        for name, graph in found.graphs.items()
    }
    target = Target("cuda", "float16", "int4", "own")
    return dataclasses.replace(found, graphs=graphs, target=target)


@pytest.fixture
def library(tmp_path, monkeypatch):
    path = tmp_path / "lib.so"
    monkeypatch.setattr(choice, "kernel_library", lambda progress: path)
    monkeypatch.setattr(choice, "require_library", lambda path: None)
    return path


def never(_):
    raise AssertionError("nothing is to be compiled")


def test_an_artifact_for_stock_kernels_asks_for_no_library(manifest):
    stock = dataclasses.replace(manifest, target=Target("cuda", "float16", "int4"))
    found = choose_kernels(stock, (8, 0), never)
    assert (found.in_use, found.built_for, found.library) == ("stock", "stock", None)
    assert found.running(stock) is stock
    assert str(found) == "stock"


def test_own_kernels_are_taken_where_they_are(manifest, library, caplog):
    found = choose_kernels(manifest, HOPPER, never)
    assert (found.in_use, found.library, found.reason) == ("own", library, "")
    assert found.running(manifest) is manifest
    assert not caplog.records


@pytest.mark.parametrize("capability", [(8, 0), (9, 5), (10, 0)])
def test_another_card_compiles_nothing_and_falls_back(manifest, capability, caplog):
    found = choose_kernels(manifest, capability, never)
    assert (found.in_use, found.built_for, found.library) == ("stock", "own", None)
    assert re.match(r"stock, although built for own: .*this GPU has \d+\.\d", str(found))
    running = found.running(manifest)
    assert {graph.file for graph in running.graphs.values()} == {
        f"{name}.stock.onnx" for name in manifest.graphs
    }
    (record,) = caplog.records
    assert record.levelno == logging.WARNING


def test_a_library_that_does_not_load_falls_back(manifest, tmp_path, monkeypatch, caplog):
    path = tmp_path / "kernels-0" / "lib.so"
    path.parent.mkdir()
    path.write_text("no library")
    monkeypatch.setattr(choice, "kernel_library", lambda progress: path)
    found = choose_kernels(manifest, HOPPER, never)
    assert found.in_use == "stock"
    assert "does not load lib.so" in found.reason
    assert "Remove kernels-0 from the cache" in found.reason
    assert len(caplog.records) == 1


def test_without_a_fallback_of_every_graph_it_is_an_error(manifest, caplog):
    graphs = dict(manifest.graphs)
    graphs["draft"] = dataclasses.replace(graphs["draft"], fallback=None)
    half = dataclasses.replace(manifest, graphs=graphs)
    with pytest.raises(KernelError, match=r"compute capability 9\.0, and this GPU has 8\.0"):
        choose_kernels(half, (8, 0), never)
    assert not caplog.records
