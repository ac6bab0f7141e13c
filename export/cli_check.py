"""``mtp-export check``: an artifact where there is a manifest, a bundle elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import click

from artifacts import Finding, Severity
from artifacts.manifest import MANIFEST
from artifacts.rules import RULES as ARTIFACT_RULES
from artifacts.rules import UNREADABLE_RULE, Rule, check_artifact
from export.bundles.check import RULES as BUNDLE_RULES
from export.bundles.check import TYPE_RULES, check_bundle
from export.bundles.layout import METADATA
from export.bundles.rule import BundleRule
from export.errors import BundleError
from export.progress import shown_progress
from export.sources import TARGET

__all__ = ["check_command"]

UNUSABLE = 2
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("check")
@click.argument("folder", type=FOLDER, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--ep",
    "provider",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Execution provider that a bundle is to run on; an artifact names its own.",
)
@click.option(
    "--select", multiple=True, metavar="RULE", help="Only this rule or family; repeatable."
)
@click.option(
    "--ignore", multiple=True, metavar="RULE", help="Not this rule or family; repeatable."
)
@click.option("--explain", metavar="RULE", help="Say what a rule means and how to mend it.")
@click.option("--no-digests", is_flag=True, help="Do not read an artifact's weights.")
@click.pass_context
def check_command(
    context: click.Context,
    folder: Path | None,
    as_json: bool,
    provider: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    explain: str | None,
    no_digests: bool,
) -> None:
    """Check the artifact or the bundle in FOLDER without running it.

    Files, types, states, aliases, the joint of target and head, what a captured graph could
    not hold. Exit code 0: clean; 1: findings; 2: nothing there that can be checked.

    \b
    Examples:
      mtp-export check qwen-mtp
      mtp-export check some-bundle --ep cuda --select capture
      mtp-export check some-bundle --json --ignore files.orphaned
      mtp-export check --explain graphs.aliases
    """
    for name in (*select, *ignore):
        _known(name)
    if explain is not None:
        click.echo("\n\n".join(_explained(explain)))
        return
    if folder is None:
        raise click.UsageError(
            "name the artifact's FOLDER, or a bundle's, or a rule with --explain"
        )
    try:
        findings = _check(folder, provider, digests=not no_digests, quiet=as_json)
    except BundleError as e:
        click.echo(f"Error: {e}", err=True)
        context.exit(UNUSABLE)
    unusable = any(finding.code == UNREADABLE_RULE.code for finding in findings)
    kept = [
        finding
        for finding in findings
        if unusable
        or ((not select or _is_in(finding.code, select)) and not _is_in(finding.code, ignore))
    ]
    _print(kept, as_json=as_json)
    if unusable:
        context.exit(UNUSABLE)
    context.exit(1 if any(f.severity is not Severity.NOTE for f in kept) else 0)


def _check(folder: Path, provider: str, *, digests: bool, quiet: bool) -> list[Finding]:
    holds_graphs = any((folder / name).exists() for name in (TARGET, *METADATA))
    if holds_graphs and not (folder / MANIFEST).exists():
        return check_bundle(folder, provider)
    with shown_progress(quiet=quiet) as progress:
        return check_artifact(
            folder,
            digests=digests,
            on_progress=lambda done, total: progress("reading weights", done, total),
        )


def _codes() -> list[str]:
    bundles = (rule.code for rule in (*TYPE_RULES, *BUNDLE_RULES))
    return list(dict.fromkeys((*ARTIFACT_RULES, *bundles)))


def _is_in(code: str, names: Iterable[str]) -> bool:
    return any(code == name or code.startswith(f"{name}.") for name in names)


def _known(name: str) -> None:
    if not any(_is_in(code, [name]) for code in _codes()):
        raise click.UsageError(f"no rule {name!r}; there are {', '.join(_codes())}")


def _explained(name: str) -> list[str]:
    """What the rules called `name` mean: an artifact's and a bundle's may share a code."""
    _known(name)
    told = [
        _text(rule, "an artifact") for rule in ARTIFACT_RULES.values() if rule.code == name
    ]
    told += [
        _text(rule, "a bundle") for rule in (*TYPE_RULES, *BUNDLE_RULES) if rule.code == name
    ]
    if not told:
        one = next(code for code in _codes() if _is_in(code, [name]))
        raise click.UsageError(f"{name!r} is a family of rules; name one, such as {one}")
    return told


def _text(rule: Rule | BundleRule, of: str) -> str:
    return (
        f"{rule.code} ({rule.severity}), of {of}: {rule.title}\n\n{rule.explanation}\n\n"
        f"Remedy: {rule.remedy}"
    )


def _print(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"findings": [finding.to_json() for finding in findings]}))
        return
    for finding in findings:
        click.echo(f"{finding.severity} {finding.code}  {finding.place}")
        click.echo(f"    {finding.message}\n    {finding.remedy}")
    click.echo(f"{len(findings)} findings" if findings else "clean")
