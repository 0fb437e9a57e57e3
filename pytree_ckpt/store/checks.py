"""Whether a chunk is what was saved: its digest, or what keeps it from being read."""

import threading
from collections.abc import Callable

import tensorstore as ts

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import Damage, DamageKind, IntegrityError
from pytree_ckpt.format import tables
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.plan.loading import ChunkRead
from pytree_ckpt.store.digests import digest_of, new_digest
from pytree_ckpt.store.failures import UnreadableError, storage_errors
from pytree_ckpt.store.requests import Array


class ReadStats:
    """What a reader has read so far; `on_read` is told the bytes."""

    def __init__(self, on_read: Callable[[int], None] | None) -> None:
        self.nbytes = 0
        self.chunks = 0
        self._on_read = on_read
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.chunks += 1
            if self._on_read is not None:
                self._on_read(self.nbytes)


class ChunkCheck:
    """Reads chunks with TensorStore, and compares digests; damage is an `IntegrityError`.

    With `verify` False no digest is compared, and all of them are empty.
    """

    def __init__(self, digest: str, *, verify: bool, clock: StageClock) -> None:
        self.new_digest = new_digest(digest)
        self.verify = verify
        self._digest_nbytes = tables.DIGEST_NBYTES[digest]
        self._clock = clock

    def hash(self, place: Array) -> bytes:
        """The digest of a chunk that is in memory."""
        return digest_of(self.new_digest, place) if self.verify else b""

    def fetch(
        self, store: ts.TensorStore, place: Array, box: Box, leaf: Leaf, read: ChunkRead
    ) -> None:
        """Read `box` of a Zarr array, which is chunk `read` of a leaf, into memory of ours."""
        where = f"chunk {position_of(read, leaf)} of {leaf.text or '(root)'}"
        try:
            with self._clock.stage("read"), storage_errors(f"reading {where}"):
                ts.array(place).write(store[box.slices()]).result()
        except FileNotFoundError:
            raise self._damage("missing", f"{where} is missing", leaf, read) from None
        except UnreadableError as error:
            text = f"{where} is damaged: {error}"
            raise self._damage("unreadable", text, leaf, read) from None

    def check(self, found: bytes, digests: bytes, leaf: Leaf, read: ChunkRead) -> None:
        """Compare a digest with that of the chunk in `digests`, those of its shard."""
        if not self.verify:
            return
        size = self._digest_nbytes
        wanted = digests[read.chunk * size : (read.chunk + 1) * size]
        if found != wanted:
            text = (
                f"chunk {position_of(read, leaf)} of {leaf.text or '(root)'} is damaged: "
                f"digest {found.hex()[:8]}…, the checkpoint has {wanted.hex()[:8]}…"
            )
            raise self._damage("digest", text, leaf, read)

    @staticmethod
    def _damage(kind: DamageKind, text: str, leaf: Leaf, read: ChunkRead) -> IntegrityError:
        damage = Damage(
            path=leaf.text,
            kind=kind,
            text=text,
            chunk=position_of(read, leaf),
            box=tuple(zip(read.box.start, read.box.stop, strict=True)),
            devices=leaf.array.devices_of(read.box),
        )
        return IntegrityError([damage])


def position_of(read: ChunkRead, leaf: Leaf) -> tuple[int, ...]:
    """Position of a chunk in the grid of all chunks of its array."""
    return tuple(a // c for a, c in zip(read.box.start, leaf.array.chunk_shape, strict=True))
