"""The objects that `--json` prints; docs/cli.md describes them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pytree_ckpt.cli.output import error_document
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.interop.exporting import ExportReport
from pytree_ckpt.interop.making import ImportReport
from pytree_ckpt.pictures.outline import Branch
from pytree_ckpt.verbs.convert import ConvertReport
from pytree_ckpt.verbs.diff import DiffReport
from pytree_ckpt.verbs.inspect import LeafReport
from pytree_ckpt.verbs.survey import PruneReport, StepSummary
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


def of_tree(root: Branch, depth: int | None) -> Document:
    """The nodes in preorder, down to `depth` keys below the root."""
    nodes = [_node(b, at) for at, b in root.walk() if depth is None or at <= depth]
    return {"nbytes": root.nbytes, "leaves": root.leaves, "nodes": nodes}


def _node(branch: Branch, depth: int) -> Document:
    found: Document = {"path": branch.path, "depth": depth, "kind": branch.kind}
    if branch.leaf is None:
        return {**found, "nbytes": branch.nbytes, "leaves": branch.leaves}
    return {**found, **_leaf(branch.leaf)}


def _leaf(leaf: Leaf) -> Document:
    """Arrays have a dtype, a shape and a sharding, values their type and what they are."""
    spec = leaf.spec
    if spec is None:
        kind = "per process" if leaf.per_process else type(leaf.value).__name__
        return {"type": kind, "value": leaf.value, "nbytes": 0}
    return {
        "type": spec.kind,
        "dtype": spec.logical_dtype,
        "shape": spec.logical_shape,
        "sharding": None if spec.sharding is None else str(spec.sharding),
        "memory_kind": None if spec.sharding is None else spec.sharding.memory_kind,
        "nbytes": spec.nbytes,
    }


def of_manifest(manifest: Manifest) -> Document:
    """All of a manifest but its leaves, which `tree` has."""
    return {
        "id": manifest.id,
        "created": manifest.created,
        "leaves": len(manifest.leaf_codes),
        "nbytes": manifest.nbytes,
        "chunks": manifest.num_chunks,
        "digest": manifest.digest,
        "meshes": [asdict(mesh) for mesh in manifest.meshes],
        "process_count": manifest.process_count,
        "device_count": manifest.device_count,
        "platform": manifest.platform,
        "versions": manifest.versions,
        "written_by": manifest.written_by or None,
        "metadata": manifest.metadata,
        "metrics": manifest.metrics,
        "seconds": manifest.seconds,
    }


def of_leaf(report: LeafReport) -> Document:
    """A leaf with its chunks."""
    numbers = report.statistics
    return {
        "path": report.leaf.text,
        **_leaf(report.leaf),
        "values": report.values,
        "chunks": [
            {**asdict(chunk), "box": list(zip(chunk.box.start, chunk.box.stop, strict=True))}
            for chunk in report.chunks
        ],
        "statistics": None if numbers is None else asdict(numbers),
    }


def of_survey(steps: Sequence[StepSummary]) -> Document:
    """The steps of a root, ascending; `manifest` as `show` has it."""
    return {
        "steps": [
            {
                "step": item.step,
                "name": item.name,
                "status": item.status,
                "pinned": item.pinned,
                "note": item.note,
                "manifest": None if item.manifest is None else of_manifest(item.manifest),
            }
            for item in steps
        ]
    }


def of_prune(report: PruneReport) -> Document:
    """For each step why it stays or goes."""
    decision = report.decision
    groups = {"kept": decision.kept, "dropped": decision.dropped, "left": decision.left}
    return {
        **{
            name: [{"step": step, "why": why} for step, why in steps.items()]
            for name, steps in groups.items()
        },
        "deleted": report.deleted,
        "in_use": report.in_use,
    }


def of_convert(report: ConvertReport) -> Document:
    """What each leaf becomes; `id` is null after a dry run."""
    plan = report.plan
    return {
        "id": None if report.manifest is None else report.manifest.id,
        "leaves": [
            {"path": leaf.text, "from": leaf.describe(), "to": plan.describe(at)}
            for at, leaf in enumerate(plan.leaves)
        ],
        "passed_over": plan.passed_over,
        "nbytes_read": plan.nbytes_read,
        "nbytes_written": plan.nbytes_written,
        "kept_nbytes": report.kept_nbytes,
    }


def of_export(report: ExportReport) -> Document:
    """The files, and what is not in them."""
    return asdict(report)


def of_import(report: ImportReport) -> Document:
    """The new checkpoint, and what is not in it."""
    return {**of_manifest(report.manifest), "left_out": report.left_out}
