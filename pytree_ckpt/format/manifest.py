"""The manifest: one file that says all about a checkpoint and pins every byte of it."""

import datetime
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.format import paths, wire
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.paths import Path
from pytree_ckpt.format.shardings import Mesh, Named
from pytree_ckpt.format.tables import DIGEST_NBYTES
from pytree_ckpt.format.trees import Tree
from pytree_ckpt.format.values import Value, count_text

MANIFEST_FILE = "manifest.msgpack"
PIN_FILE = "pinned.txt"
"""Keeps a checkpoint from every policy; what is in it is for people."""
QUARANTINE_FILE = "damaged.txt"
"""Marks a checkpoint that a load found damaged: its data folder in the first line, then why."""
VALUE = -1
PER_PROCESS = -2
"""Codes in the column of leaves beside the indices of array specs."""

_NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)
_END_OF_CALENDAR = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC).timestamp()


DATA_ENTRIES = frozenset({"arrays", "packed", "tables", "unfinished"})
"""All that a save puts in its folder; one with anything else in it is somebody else's."""


def data_dir(nonce: str) -> str:
    """The folder of all that one save wrote."""
    return f"data-{nonce}"


def is_data_dir(name: str) -> bool:
    """Whether a folder of this name is one that `data_dir` names."""
    return name.startswith("data-") and _NONCE.fullmatch(name, len("data-")) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRef:
    """Size and sha256 of the table of one process."""

    nbytes: int
    id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One leaf: where it is in the tree, and its array spec or its value."""

    index: int
    path: Path
    text: str
    spec: ArraySpec | None
    value: Value | None
    name: str | None
    per_process: bool

    @property
    def array(self) -> ArraySpec:
        """The spec of a leaf that is an array.

        Raises:
            CheckpointError: It is none.
        """
        if self.spec is None:
            raise CheckpointError(f"{self.text} is not an array")
        return self.spec

    def __str__(self) -> str:
        return f"{self.text or '(root)'}  {self.describe()}"

    def __repr__(self) -> str:
        return f"Leaf({self})"

    def describe(self) -> str:
        """Type and layout in a few words."""
        if self.per_process:
            return "one value per process"
        if self.spec is None:
            return type(self.value).__name__
        return self.spec.describe()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. Made by `save`, read by `read_manifest`.

    Attributes:
        nonce: Names the data folder, `data-<nonce>`.
        digest: Algorithm of the chunk digests.
        tree: The containers, with typed keys.
        specs: The distinct array specs.
        leaf_codes: For each leaf an index into `specs`, or `VALUE`, or `PER_PROCESS`.
        values: The Python values, in the order of their leaves.
        names: For each leaf that is stored as a Zarr array of its own, the folder's name.
        process_count: Processes of the layout.
        device_count, platform, versions: Where it was saved, and with which libraries.
        tables: One for each process that wrote.
        metadata: What the user gave to `save`.
        metrics: Numbers that rank this checkpoint among others.
        created: Seconds since 1970, UTC.
        seconds: Seconds of each stage of the save.
        source: What the checkpoint was made from if no run saved it: its `kind` ("checkpoint",
            "safetensors", "npz", "orbax"), `path`, and `holds` ("all" or "part" of it, or
            "weights" alone); empty if a run saved it.
        linked_nbytes: Bytes of array data in files that the save linked from its base.
        written_by: `user@host` of the process that committed it; empty if it is not known.
        id: sha256 of the content; it pins every byte of the checkpoint.
    """

    nonce: str
    digest: str
    tree: Tree
    specs: tuple[ArraySpec, ...]
    leaf_codes: tuple[int, ...]
    values: tuple[Value, ...]
    names: tuple[str, ...]
    process_count: int
    device_count: int
    platform: str
    tables: tuple[TableRef, ...]
    metadata: Any
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    created: float
    seconds: Mapping[str, float]
    source: Mapping[str, str] = field(default_factory=dict)
    linked_nbytes: int = 0
    written_by: str = ""
    id: bytes = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        if not _NONCE.fullmatch(self.nonce):
            raise ValueError(f"bad nonce {self.nonce!r}")
        if self.digest not in DIGEST_NBYTES:
            raise ValueError(f"digest {self.digest!r} is not known to this release")
        if len(self.leaf_codes) != self.tree.num_leaves:
            raise ValueError(f"{len(self.leaf_codes)} leaves in a tree of {self.tree.num_leaves}")
        if any(not PER_PROCESS <= code < len(self.specs) for code in self.leaf_codes):
            raise ValueError("a leaf has a code without meaning")
        if self.leaf_codes.count(VALUE) != len(self.values):
            raise ValueError("values and leaves differ in number")
        own = sum(code >= 0 and self.specs[code].storage == "array" for code in self.leaf_codes)
        if own != len(self.names) or len({n.lower() for n in self.names}) != own:
            raise ValueError("array folders and leaves differ in number, or two share a name")
        if not all(map(paths.is_safe_file_name, self.names)):
            raise ValueError("an array folder has a name that could leave the checkpoint")
        if not self.tables or self.process_count < 1:
            raise ValueError("a manifest has at least one table and one process")
        if any(table.nbytes > wire.MAX_FILE_BYTES for table in self.tables):
            raise ValueError("a table is larger than any table")
        if self.num_chunks * DIGEST_NBYTES[self.digest] > sum(t.nbytes for t in self.tables):
            # Who reads the chunks can trust that there are about as many as bytes were read.
            raise ValueError(f"the tables cannot have the digests of {self.num_chunks} chunks")
        if not 0 <= self.created < _END_OF_CALENDAR:
            raise ValueError(f"bad time of the save: {self.created}")

    @property
    def data_dir(self) -> str:
        return data_dir(self.nonce)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every leaf, in order."""
        found: list[Leaf] = []
        python_values, names = iter(self.values), iter(self.names)
        for index, (path, code) in enumerate(
            zip(self.tree.leaf_paths(), self.leaf_codes, strict=True)
        ):
            spec = self.specs[code] if code >= 0 else None
            found.append(
                Leaf(
                    index=index,
                    path=path,
                    text=paths.to_text(path),
                    spec=spec,
                    value=next(python_values) if code == VALUE else None,
                    name=next(names) if spec and spec.storage == "array" else None,
                    per_process=code == PER_PROCESS,
                )
            )
        return tuple(found)

    @cached_property
    def by_text(self) -> Mapping[str, Leaf]:
        """The leaves by the text of their path."""
        return {leaf.text: leaf for leaf in self.leaves}

    @property
    def leaf_specs(self) -> list[ArraySpec | None]:
        """The array spec of each leaf, None for values."""
        return [self.specs[code] if code >= 0 else None for code in self.leaf_codes]

    @property
    def packed_codec(self) -> str | None:
        """Codec of the packed arrays, None if nothing is packed."""
        return next((spec.codec for spec in self.specs if spec.storage == "packed"), None)

    @property
    def num_chunks(self) -> int:
        """Chunks of all arrays; each has a digest."""
        counts = Counter(code for code in self.leaf_codes if code >= 0)
        return sum(count * self.specs[code].num_chunks for code, count in counts.items())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, each counted once, before any codec."""
        return sum(spec.nbytes for spec in self.leaf_specs if spec is not None)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The distinct meshes of the shardings."""
        found = (s.sharding.mesh for s in self.specs if isinstance(s.sharding, Named))
        return tuple(dict.fromkeys(found))

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        from pytree_ckpt.pictures.pages import manifest_html

        return manifest_html(self)

    def __repr__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.created, datetime.UTC)
        keys = [str(path[0]) for path, _ in self.tree.walk() if len(path) == 1]
        inside = f" in {', '.join(keys if len(keys) <= 6 else [*keys[:5], '…'])}" if keys else ""
        parts = [
            f"{count_text(len(self.leaf_codes), 'leaf', 'leaves')}{inside}",
            f"{self.nbytes:,} bytes",
            *(map(str, self.meshes) if self.meshes else ["no mesh"]),
            f"{count_text(self.process_count, 'process', 'processes')} with "
            f"{count_text(self.device_count, f'{self.platform} device')}",
            self.digest,
            *(f"{name}={value:g}" for name, value in self.metrics.items()),
            f"{when:%Y-%m-%d %H:%M:%S} UTC",
            f"id {self.id.hex()[:12]}",
        ]
        return f"Manifest({'; '.join(parts)})"
