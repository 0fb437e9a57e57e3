"""Fuzz the parsers by coverage: `python -m tests.faults.fuzz FOLDER`, by hand, with atheris.

atheris is in no lock file; `pip install atheris` puts it beside the rest. The folder keeps what
the fuzzer finds out. Arguments with a dash are libFuzzer's, such as `-max_total_time=60`.
"""

import sys
from pathlib import Path

from tests.hostile import Files, body_of, sealed

FROZEN = Path(__file__).parents[1] / "data" / "v1_raw"
MANIFEST, TABLE = b"m", b"t"


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["pytree_ckpt.format"]):
        from pytree_ckpt.errors import FormatError
        from pytree_ckpt.format import manifest_file, tables
        from pytree_ckpt.format.tables import ShardIndex

    good = Files.read(FROZEN)
    saved = manifest_file.from_bytes(good.manifest, what="the manifest")

    def one_input(data: bytes) -> None:
        """A body of a manifest or of a table, as its first byte says; its digest is right."""
        body = data[1:]
        try:
            if data[:1] == MANIFEST:
                found = manifest_file.from_bytes(sealed(body), what="the manifest")
                assert repr(found)
                assert len(found.leaves) == found.tree.num_leaves
            else:
                table, _ = tables.from_bytes(sealed(body, "table"), what="the table")
                ShardIndex(saved.leaf_specs, [table], digest=saved.digest)
        except FormatError:
            return

    for folder in (Path(word) for word in sys.argv[1:] if not word.startswith("-")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest").write_bytes(MANIFEST + body_of(good.manifest))
        (folder / "table").write_bytes(TABLE + body_of(good.table))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
