"""What there is to say of a checkpoint and its parts, in words."""

import datetime

from pytree_ckpt.format import values
from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.format.values import count_text
from pytree_ckpt.pictures.outline import Branch
from pytree_ckpt.pictures.text import percent_text, size_text


def manifest_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """What to know first about a checkpoint, each with its name."""
    when = datetime.datetime.fromtimestamp(manifest.created, datetime.UTC)
    leaves = count_text(len(manifest.leaf_codes), "leaf", "leaves")
    return [
        ("state", f"{leaves}, {size_text(manifest.nbytes)}"),
        ("mesh", ", ".join(map(str, manifest.meshes)) or "none"),
        ("saved by", writer_words(manifest)),
        ("saved at", f"{when:%Y-%m-%d %H:%M:%S} UTC"),
        ("with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("chunks", f"{manifest.num_chunks:,} with {manifest.digest}"),
        ("id", manifest.id.hex()[:16]),
    ]


def writer_words(manifest: Manifest) -> str:
    """Who saved a checkpoint."""
    processes = count_text(manifest.process_count, "process", "processes")
    devices = count_text(manifest.device_count, f"{manifest.platform} device")
    version = f"pytree-ckpt {manifest.versions.get('pytree-ckpt', '?')}"
    who = [manifest.written_by] if manifest.written_by else []
    return ", ".join([*who, f"{processes} with {devices}", version])


def branch_words(branch: Branch, total: int) -> str:
    """A container in words."""
    words = [branch.kind, count_text(branch.leaves, "leaf", "leaves"), size_text(branch.nbytes)]
    return ", ".join([*words, *([percent_text(branch.nbytes / total)] if total else [])])


def leaf_words(branch: Branch) -> str:
    """A leaf, or a container without children, in words."""
    leaf = branch.leaf
    if leaf is None:
        return "None" if branch.kind == "none" else f"empty {branch.kind}"
    if leaf.spec is None:
        value = "" if leaf.per_process else f" {values.to_text(leaf.value)}"
        return f"{leaf.describe()}{value}"
    return f"{leaf.describe()}, {size_text(leaf.spec.nbytes)}"
