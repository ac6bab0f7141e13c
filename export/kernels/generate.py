"""Write the schemas and the kernel registry of the installed ONNX Runtime as JSON.

    python -m export.kernels.generate artifacts/types/ort_table.json

ONNX Runtime tells its CPU registry on any machine. Its whole registry, the CUDA kernels
with it, it tells only when every provider library of the wheel loads; for that a machine
needs the CUDA libraries (or a stand-in for them loaded first, by ``--preload``) and
TensorRT's, of which an empty stand-in is enough and is compiled here.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import onnx

__all__ = ["kernel_table", "main", "registry", "schema_table"]

DOMAINS = ("", "com.microsoft")
PROVIDERS = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}
TENSORRT = {
    "libnvinfer.so.10": (
        "createInferBuilder_INTERNAL",
        "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL",
        "getInferLibVersion",
        "getPluginRegistry",
    ),
    "libnvonnxparser.so.10": (
        "createNvOnnxParser_INTERNAL",
        "createNvOnnxParserRefitter_INTERNAL",
    ),
}
"""What the wheel's TensorRT provider must find to load; none of it is called."""
Row = tuple[int, int, dict[str, list[str]]]
"""First and last version of the op, and the dtypes by type parameter."""


def registry(state: Any, everything: bool) -> list[Any]:
    """The kernel definitions: of all providers, or of the CPU provider alone.

    `state` is ``onnxruntime.capi.onnxruntime_pybind11_state``. Asking for everything ends
    the process when a provider library of the wheel does not load.
    """
    if everything:
        return list(state.get_all_opkernel_def())
    return list(state.get_registered_ep_kernel_defs("CPUExecutionProvider"))


def kernel_table(definitions: Iterable[Any]) -> dict[str, dict[str, list[Row]]]:
    """Kernels by provider and op (``com.microsoft.LinearAttention``), each row once."""
    table: dict[str, dict[str, list[Row]]] = {}
    for kernel in definitions:
        provider = PROVIDERS.get(kernel.provider)
        if provider is None or kernel.domain not in DOMAINS:
            continue
        types = {
            name: sorted(_short(t) for t in allowed)
            for name, allowed in sorted(kernel.type_constraints.items())
        }
        rows = table.setdefault(provider, {}).setdefault(
            _key(kernel.domain, kernel.op_name), []
        )
        row = (*kernel.version_range, types)
        if row not in rows:
            rows.append(row)
    return {
        provider: {op: _merged(ops[op]) for op in sorted(ops)}
        for provider, ops in sorted(table.items())
    }


def schema_table(schemas: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Signatures of the ops that ONNX itself does not define."""
    table = {}
    for schema in schemas:
        known = schema.domain == "" and onnx.defs.has(schema.name, domain="")
        if schema.domain not in DOMAINS or known:
            continue
        table[_key(schema.domain, schema.name)] = {
            "since": schema.since_version,
            "inputs": [_formal(formal) for formal in schema.inputs],
            "outputs": [_formal(formal) for formal in schema.outputs],
            "types": {
                c.type_param_str: sorted(_short(t) for t in c.allowed_type_strs)
                for c in schema.type_constraints
            },
        }
    return dict(sorted(table.items()))


def _merged(rows: list[Row]) -> list[Row]:
    """Rows that differ in the dtypes of one parameter alone, as one row."""
    merged: list[Row] = []
    for first, last, types in sorted(rows, key=lambda r: json.dumps(r)):
        for i, (a, b, others) in enumerate(merged):
            differing = [name for name in types if types[name] != others.get(name)]
            same_keys = (a, b) == (first, last) and types.keys() == others.keys()
            if same_keys and len(differing) <= 1:
                union = {n: sorted({*types[n], *others[n]}) for n in differing}
                merged[i] = (a, b, others | union)
                break
        else:
            merged.append((first, last, types))
    return merged


def _key(domain: str, name: str) -> str:
    return f"{domain}.{name}" if domain else name


def _short(type_string: str) -> str:
    """``float16`` for ``tensor(float16)``; other kinds of types as they are."""
    plain = type_string.startswith("tensor(")
    return type_string[len("tensor(") : -1] if plain else type_string


def _formal(formal: Any) -> list[Any]:
    """Name, type or type parameter, and one letter: single, optional, variadic, mixed."""
    kind = formal.option.name[0].lower()
    if kind == "v" and not getattr(formal, "isHomogeneous", True):
        kind = "m"
    return [formal.name, _short(formal.typeStr), kind]


def _load_tensorrt_standin(folder: Path) -> None:
    for name, symbols in TENSORRT.items():
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            code = "".join(f"long {symbol}(void) {{ return 0; }}\n" for symbol in symbols)
            path = folder / name
            flags = [
                "-shared",
                "-fPIC",
                f"-Wl,-soname,{name}",
                "-o",
                str(path),
                "-x",
                "c",
                "-",
            ]
            subprocess.run(["cc", *flags], input=code, text=True, check=True)
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@click.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--preload", multiple=True, help="a library to load before ONNX Runtime")
@click.option("--cpu-only", is_flag=True, help="leave the CUDA kernels out")
def main(output: Path, preload: tuple[str, ...], cpu_only: bool) -> None:
    """Write the table of the installed ONNX Runtime to OUTPUT."""
    for library in preload:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as folder:
        if not cpu_only:
            _load_tensorrt_standin(Path(folder))
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        table = {
            "onnxruntime": onnxruntime.__version__,
            "schemas": schema_table(state.get_all_operator_schema()),
            "kernels": kernel_table(registry(state, everything=not cpu_only)),
        }
    lines = [f'{{"onnxruntime": {json.dumps(table["onnxruntime"])}']
    lines += [f'"schemas": {{\n{_rows(table["schemas"])}}}']
    kernels = (f"{json.dumps(p)}: {{\n{_rows(rows)}}}" for p, rows in table["kernels"].items())
    lines += ['"kernels": {' + ",\n".join(kernels) + "}"]
    output.write_text(",\n".join(lines) + "}\n", encoding="utf-8")


def _rows(table: dict[str, Any]) -> str:
    """One op a line, so that a new release shows as a readable difference."""
    dense = {name: json.dumps(row, separators=(",", ":")) for name, row in table.items()}
    return ",\n".join(f"{json.dumps(name)}: {text}" for name, text in dense.items())


if __name__ == "__main__":
    main()
