"""What a person sees of a public name at a prompt: its help, and the text of what it makes."""

import inspect
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc

FUNCTIONS = [name for name in pc.__all__ if inspect.isfunction(getattr(pc, name))]
EXPLAINED_ELSEWHERE = {"export_npz", "import_safetensors"}
"""Whose counterpart has the example of both."""
NEEDS_ORBAX = {"import_orbax"}
"""Its example is in docs/orbax.md, which tests/test_docs.py runs."""


@pytest.mark.parametrize("name", pc.__all__)
def test_every_public_name_begins_with_its_contract(name: str) -> None:
    text = inspect.getdoc(getattr(pc, name))
    assert text
    assert text.splitlines()[0].endswith(".")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_has_its_errors_and_an_example_which_the_doctests_run(
    name: str,
) -> None:
    text = inspect.getdoc(getattr(pc, name)) or ""
    assert ">>> " in text or name in EXPLAINED_ELSEWHERE | NEEDS_ORBAX
    assert "Raises:" in text or "errors as `save`" in text


def test_a_text_is_short_and_tells_what_matters(
    tmp_path: Path, mesh_4x2: jax.sharding.Mesh
) -> None:
    sharding = NamedSharding(mesh_4x2, PartitionSpec("data"))
    layers = {f"layer_{i}": jax.device_put(np.ones((8, 4)), sharding) for i in range(50)}
    manifest = pc.save(tmp_path / "a", {"params": layers, "step": 7})
    ckpt = pc.open(tmp_path / "a")
    texts: dict[str, Any] = {
        "51 leaves in params, step; 6,400 bytes; mesh(data=4, model=2); 1 process with 8": manifest,
        "Leaf(step  int)": manifest.by_text["step"],
        "a', Manifest(51 leaves": ckpt,
        "StoredArray(params/layer_0  float32[8, 4] P('data') on mesh(data=4, model=2))": ckpt[
            "params/layer_0"
        ],
        "Restructured(50 leaves by rules, of 51)": pc.plan_restructure(
            manifest, rename={"params": "model"}
        ),
        "ConvertPlan(51 leaves; 6400 bytes to read, 6400 to write)": pc.convert(
            tmp_path / "a", tmp_path / "b", dry_run=True
        ),
        "VerifyReport(path=": pc.verify(tmp_path / "a"),
        "DiffReport(a=": pc.diff(tmp_path / "a", tmp_path / "a"),
    }
    for wanted, value in texts.items():
        assert wanted in repr(value)
        assert len(repr(value)) < 400
    ckpt.close()
    assert repr(ckpt).endswith(", closed)")


def test_one_of_a_thing_is_named_in_the_singular(tmp_path: Path) -> None:
    manifest = pc.save(tmp_path, {"w": np.ones(3)})
    assert "Manifest(1 leaf in w; 24 bytes; no mesh" in repr(manifest)
    assert str(pc.verify(tmp_path)).endswith(": whole; 1 chunk, 24 bytes checked")


def test_a_quick_look_does_not_call_whole_what_it_did_not_read(tmp_path: Path) -> None:
    pc.save(tmp_path, {"w": np.ones(3)})
    lines = str(pc.verify(tmp_path, quick=True)).splitlines()
    assert lines[0].endswith(": no damage seen; 0 chunks, 0 bytes checked")
    assert lines[1] == "  not checked: the digests of 1 chunk, 24 bytes"
