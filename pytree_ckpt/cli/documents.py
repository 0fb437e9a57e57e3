"""The objects that `--json` prints; docs/cli.md describes them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pytree_ckpt.cli.output import error_document
from pytree_ckpt.verbs.diff import DiffReport
from pytree_ckpt.verbs.verify import VerifyReport

Document = dict[str, Any]


def of_verify(reports: Sequence[VerifyReport], errors: Sequence[Exception]) -> Document:
    """What `verify` found, checkpoint by checkpoint, and why others could not be checked."""
    return {
        "checkpoints": [{"ok": report.ok, **asdict(report)} for report in reports],
        "errors": [error_document(error) for error in errors],
    }


def of_diff(report: DiffReport) -> Document:
    """What `diff` found."""
    return {"same": report.same, **asdict(report)}
