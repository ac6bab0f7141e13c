"""Where chat templates run: jinja2's sandbox, with limits.

A template comes with a checkpoint and is a program. The sandbox keeps it from everything but
the values given. Besides, the turns of its loops and the length of what it makes are limited,
so that it cannot use up time or memory: loops and joined texts are counted by filters that
are put around them when a template is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

__all__ = ["FAULTS", "SPENT", "Sandbox", "Spent"]

MAX_OUTPUT = 16 * 2**20
"""Characters of a text, items of a list; far over any capacity."""
MAX_TURNS = 1_000_000
"""Turns of all loops of one rendering together."""
MAX_BITS = 4096
"""Of a whole number."""
PADDING = (
    "center",
    "expandtabs",
    "format",
    "format_map",
    "ljust",
    "rjust",
    "translate",
    "zfill",
)
"""Methods of texts whose result is as long as an argument says."""

FAULTS: tuple[type[Exception], ...] = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What a template can raise, being a program."""

SPENT = "mtp_spent"
"""Variable that holds the `Spent` of a rendering."""


class Spent:
    """What a rendering used so far; raises `jinja2.TemplateError` where it is too much."""

    def __init__(self) -> None:
        self._turns = self._output = 0

    def turns(self, values: Iterable[Any]) -> list[Any]:
        """The values of a loop, counted."""
        listed = list(values)
        self._turns += len(listed)
        if self._turns > MAX_TURNS:
            raise jinja2.TemplateRuntimeError(f"its loops take over {MAX_TURNS} turns")
        return listed

    def output(self, size: int) -> None:
        """Count characters that were put out."""
        self._output += size
        if self._output > MAX_OUTPUT:
            raise jinja2.TemplateRuntimeError(f"its text is over {MAX_OUTPUT} characters")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Renders as transformers does, within the limits.

    A template has to be given a `Spent` as the variable `SPENT`.
    """

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self.filters |= {
            "tojson": _to_json,
            "join": _join,
            "replace": _replace,
            "mtp_turns": _turns,
            "mtp_concat": _concat,
        }
        for name in ("center", "format", "indent", "urlize", "wordwrap"):
            del self.filters[name]  # as `PADDING`

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute, unless the result would be huge."""
        size = 0
        if operator == "**":
            size = MAX_OUTPUT + 1 if _bits(left) * max(_bits(right), 1) > 64 else 0
        elif operator == "+":
            size = _size(left) + _size(right)
        elif operator == "*":
            size = _product(left, right)
        elif isinstance(left, str | bytes):
            raise jinja2.TemplateRuntimeError("it formats text with %; use ~")
        _check(size)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute."""
        if isinstance(obj, str) and attr in PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, *args: Any, **named: Any) -> Any:  # noqa: D102
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name in ("join", "replace"):
            made = _join(args[0], owner) if name == "join" else _replace(owner, *args)
            return made
        return super().call(context, obj, *args, **named)

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = _filtered(loop.iter, "mtp_turns", loop.lineno)
        return _Joins().visit(tree)


class _Joins(jinja2.visitor.NodeTransformer):
    """Turns ``a ~ b`` into a filter that looks at the length first."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(parts, "mtp_concat", [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}..{% endgeneration %}``: a mark for training, here nothing."""

    tags: set[str] = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(value: Any, name: str, line: int) -> jinja2.nodes.Filter:
    spent = jinja2.nodes.Name(SPENT, "load", lineno=line)
    return jinja2.nodes.Filter(value, name, [spent], [], None, None, lineno=line)


def _turns(values: Any, spent: Spent) -> list[Any]:
    return spent.turns(values)


def _concat(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check(sum(map(len, texts)))
    return "".join(texts)


def _join(values: Any, joint: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise jinja2.TemplateRuntimeError("join takes no attribute here; use map before it")
    texts = [str(value) for value in values]
    _check(sum(map(len, texts)) + len(str(joint)) * len(texts))
    return str(joint).join(texts)


def _replace(value: Any, old: Any, new: Any, count: int = -1) -> str:
    text, old, new = str(value), str(old), str(new)
    _check(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form[:100])


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Without HTML's escapes, which jinja2's own makes."""
    indent = indent if indent is None else min(indent, 8)
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _check(size: int) -> None:
    if size > MAX_OUTPUT:
        raise jinja2.TemplateRuntimeError(f"it makes a value over {MAX_OUTPUT} long")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _product(left: Any, right: Any) -> int:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            return len(one) * other
    return MAX_OUTPUT + 1 if _bits(left) + _bits(right) > MAX_BITS else 0
