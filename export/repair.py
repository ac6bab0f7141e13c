"""Mends a bundle of another exporter; what comes out is the same kind of bundle."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from artifacts.types.check import check_types
from export.bundles.describe import load_graphs
from export.bundles.graph_index import GraphIndex, read_graph_file
from export.bundles.layout import BundleLayout, find_layout
from export.bundles.mend_metadata import mend_metadata
from export.errors import BundleError, ExportError
from passes.expose_hidden import ExposeHiddenPass
from passes.guard_norms import GuardNormsPass
from passes.retype import RetypePass
from passes.settle_attention import SettleAttentionPass
from passes.unify_types import UnifyTypesPass

__all__ = ["PREFERENCES", "FileRepair", "RepairError", "repair_bundle"]

PREFERENCES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float"}


class RepairError(ExportError):
    """A bundle cannot be mended, or its place cannot be written."""


@dataclass(frozen=True, slots=True)
class FileRepair:
    """What was done to one file."""

    file: str
    done: tuple[str, ...]
    """In words, the passes or edits that changed it."""
    difference: tuple[str, ...]
    """Lines before (``-``) and after (``+``), nodes in ONNX's text form."""


def repair_bundle(
    folder: Path,
    output: Path,
    *,
    prefer: str | None = None,
    provider: str = "cpu",
    dry_run: bool = False,
) -> tuple[FileRepair, ...]:
    """Mend the bundle in `folder` into `output`; empty when there was nothing to do.

    Weights are never rewritten: data files are copied as they are. When `output` is
    `folder`, each changed file is replaced as a whole.

    Args:
        folder: Of the bundle.
        output: A folder that does not exist yet, or `folder` itself.
        prefer: ``fp16``, ``bf16`` or ``fp32``. Decides where a clash can be mended either
            way; and when `provider` lacks kernels for the model's half type but has them
            for this one, the graph computes in it behind unchanged inputs and outputs.
        provider: ``cpu`` or ``cuda``.
        dry_run: Only say what would be done.

    Raises:
        BundleError: When `folder` holds no bundle that can be read.
        RepairError: When `prefer` is unknown, or `output` exists already.
    """
    if prefer is not None and prefer not in PREFERENCES:
        raise RepairError(f"'{prefer}' is none of {', '.join(PREFERENCES)}")
    in_place = output.exists() and output.resolve() == folder.resolve()
    if output.exists() and not in_place:
        raise RepairError(f"{output} exists; name a folder that does not")
    layout = find_layout(folder)
    kind = PREFERENCES[prefer] if prefer else None
    written: dict[str, bytes] = {}
    repairs = []
    for role, file in layout.graphs.items():
        expose = role == "target" and layout.head is not None
        repair, content = _mend_graph(folder / file, role, file, kind, provider, expose)
        if content is not None:
            repairs.append(repair)
            written[file] = content
    for repair, content in _mend_metadata(layout, written.get(layout.target)):
        repairs.append(repair)
        written[repair.file] = content
    if not dry_run and in_place:
        for file, content in written.items():
            _replace(folder / file, content)
    elif not dry_run:
        _write(folder, output, written)
    return tuple(repairs)


def _mend_graph(
    path: Path, role: str, file: str, prefer: str | None, provider: str, expose: bool
) -> tuple[FileRepair, bytes | None]:
    before = read_graph_file(path)
    model = ir.from_proto(before)
    done = []
    if GuardNormsPass()(model).modified:
        done.append("norms guarded against rows of zeros")
    if expose and ExposeHiddenPass()(model).modified:
        done.append("the hidden state after the final norm made an output")
    if UnifyTypesPass(prefer, provider)(model).modified:
        done.append("types unified")
    inside = "(Attention)/"
    if any(inside in place for place in _places(model, "types.clash", role, provider)):
        SettleAttentionPass()(model)
        done.append("attention masks settled")
    for source in _without_kernels(model, role, prefer, provider):
        target = ir.DataType[prefer.upper()] if prefer else ir.DataType.FLOAT
        if RetypePass(source, target)(model).modified:
            done.append(f"{source.name.lower()} carried out as {prefer}")
            UnifyTypesPass(prefer, provider)(model)
    if not done:
        return FileRepair(file, (), ()), None
    after = ir.to_proto(model)
    return FileRepair(file, tuple(done), tuple(_difference(before, after))), (
        after.SerializeToString(deterministic=True)
    )


def _places(model: ir.Model, code: str, role: str, provider: str) -> Iterator[str]:
    findings = check_types(ir.to_proto(model), role, provider)
    return (finding.place for finding in findings if finding.code == code)


def _without_kernels(
    model: ir.Model, role: str, prefer: str | None, provider: str
) -> Iterator[ir.DataType]:
    """Half types that the provider does not run, when another one is preferred."""
    if prefer is None:
        return
    proto = ir.to_proto(model)
    faults = [f for f in check_types(proto, role, provider) if f.code == "types.kernel"]
    for kind in ("bfloat16", "float16"):
        if kind != prefer and any(re.search(rf"\b{kind}\b", f.message) for f in faults):
            yield ir.DataType[kind.upper()]


def _mend_metadata(
    layout: BundleLayout, target: bytes | None
) -> Iterator[tuple[FileRepair, bytes]]:
    """Mend the metadata; `target` is the target's graph as it will be, if that changed."""
    if layout.metadata is None:
        return
    index = load_graphs(layout)["target"]
    if target is not None:
        model = onnx.ModelProto()
        model.ParseFromString(target)
        index = GraphIndex(model)
    text = (layout.folder / layout.metadata).read_bytes().decode()
    mended, done = mend_metadata(text, layout.declared, index)
    if done:
        lines = _changed_lines(text.splitlines(), mended.splitlines())
        yield FileRepair(layout.metadata, tuple(done), tuple(lines)), mended.encode()


def _difference(before: onnx.ModelProto, after: onnx.ModelProto) -> Iterator[str]:
    return _changed_lines(_node_lines(before), _node_lines(after))


def _node_lines(model: onnx.ModelProto) -> list[str]:
    return [" ".join(onnx.printer.to_text(node).split()) for node in model.graph.node]


def _changed_lines(before: list[str], after: list[str]) -> Iterator[str]:
    for line in difflib.unified_diff(before, after, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            yield line


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(path.stat().st_mode & 0o777)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _write(folder: Path, output: Path, written: dict[str, bytes]) -> None:
    """Copy the bundle beside `output` and rename it there when it is whole."""
    paths = [(path, path.relative_to(folder)) for path in sorted(folder.rglob("*"))]
    for path, _ in paths:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BundleError(f"{path} is a link or no plain file; put the file itself there")
    output.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        for path, name in paths:
            if path.is_dir():
                (stage / name).mkdir()
            elif name.as_posix() not in written:
                shutil.copyfile(path, stage / name)
        for file, content in written.items():
            (stage / file).write_bytes(content)
        stage.chmod(0o755)
        stage.rename(output)
    except OSError:
        shutil.rmtree(stage, ignore_errors=True)
        raise
