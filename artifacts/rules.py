"""Static checks of an artifact: a table of named rules, none of which runs a graph.

Reads ONNX, so a runner never imports this module; `artifacts` itself does not either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from artifacts.findings import Finding, Severity
from artifacts.manifest import MANIFEST, Manifest
from artifacts.parse import ParseError
from artifacts.rule import Case, Fault, Progress, Rule
from artifacts.rules_aliases import ALIAS_RULES
from artifacts.rules_files import FILE_RULES
from artifacts.rules_graphs import GRAPH_RULES
from artifacts.rules_spec import SIZES_RULE, SPEC_RULES
from artifacts.rules_weights import WEIGHT_RULES

__all__ = ["RULES", "Rule", "check_artifact"]

MOST_FAULTS = 20
"""Findings of one rule that are told apart; of a broken file there could be millions."""
MOST_CHARACTERS = 600
"""Of a message: names come from files, and a name may be a megabyte."""


def _nothing(_: Case) -> Iterator[Fault]:
    return iter(())  # there is no case before the manifest is read; see check_artifact


UNREADABLE_RULE = Rule(
    code="manifest.unreadable",
    severity=Severity.ERROR,
    title="the folder is an artifact whose manifest can be read",
    explanation="All else is found through the manifest; without it no other rule can run.",
    remedy="name the folder that mtp-export build wrote, or build the artifact again",
    run=_nothing,
)

RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        UNREADABLE_RULE,
        SIZES_RULE,
        *SPEC_RULES,
        *FILE_RULES,
        *WEIGHT_RULES,
        *GRAPH_RULES,
        *ALIAS_RULES,
    )
}
"""By code, in the order in which they run."""


def check_artifact(
    folder: Path, *, digests: bool = True, on_progress: Progress | None = None
) -> list[Finding]:
    """Check what can be checked of an artifact without running it.

    Args:
        folder: Of the artifact; anything may be in it.
        digests: Read every byte and compare its sha256; minutes for a large weight file.
        on_progress: Called with bytes read and bytes in all while digests are taken.

    Returns:
        Findings in the order of `RULES`; empty when nothing is wrong. Faults of the files
        are findings, never errors.
    """
    try:
        manifest = Manifest.read(folder)
    except ParseError as e:
        return [_finding(UNREADABLE_RULE, Fault(MANIFEST, str(e)))]
    except (OSError, ValueError) as e:
        return [_finding(UNREADABLE_RULE, Fault(MANIFEST, f"{folder} cannot be read: {e}"))]
    case = Case(folder, manifest, digests=digests, on_progress=on_progress)
    findings = list(_findings(SIZES_RULE, case))
    if not findings:
        for rule in RULES.values():
            findings += _findings(rule, case)
    return findings


def _findings(rule: Rule, case: Case) -> Iterator[Finding]:
    left = 0
    for count, fault in enumerate(rule.run(case)):
        if count < MOST_FAULTS:
            yield _finding(rule, fault)
        else:
            left += 1
    if left:
        yield _finding(rule, Fault(MANIFEST, f"{left} more places where this does not hold"))


def _finding(rule: Rule, fault: Fault) -> Finding:
    return Finding(
        code=rule.code,
        severity=fault.severity or rule.severity,
        place=_shown(fault.place),
        message=_shown(fault.message),
        remedy=rule.remedy,
    )


def _shown(text: str) -> str:
    """Short enough for a line, and nothing that a terminal would obey."""
    if len(text) > MOST_CHARACTERS:
        text = text[: MOST_CHARACTERS - 3] + "..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
