"""What the pages of the documentation show can be run, and does what they say it does."""

import itertools
import os
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import pytree_ckpt as pc

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(ROOT)): blocks
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if (blocks := re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", page.read_text(), re.M))
}
WITH_CODE = [page for page, blocks in PAGES.items() if "python" in dict(blocks)]


def _step(state: dict[str, Any], batch: Any = 1) -> dict[str, Any]:
    return {**state, "step": state["step"] + 1}


def _step_with_loss(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], int]:
    return _step(state, batch), 0


def _what_a_page_takes_for_granted(page: str) -> dict[str, Any]:
    """The names that the code of a page uses without a word of where they are from."""
    run = {
        "state": {"w": jnp.zeros(8), "step": 0},
        "batches": [1.0, 2.0],
        "tmp_path": Path("tmp"),
        "pc": pc,
    }
    if page == "README.md":
        return run | {"train_step": _step}
    if page == "docs/storage.md":

        def on_this_machine(root: str, *, mirror: str, **options: Any) -> pc.CheckpointManager:
            assert mirror.startswith("s3://")
            return pc.CheckpointManager(root, mirror="memory://of the page", **options)

        pc_ = types.SimpleNamespace(CheckpointManager=on_this_machine, Keep=pc.Keep)
        return run | {"train_step": _step, "pc": pc_}
    if page == "docs/multihost.md":
        jax_ = types.SimpleNamespace(distributed=types.SimpleNamespace(initialize=lambda *_: None))
        os_ = types.SimpleNamespace(environ={"JOB_COMPLETION_INDEX": "0"})
        return run | {"train_step": _step, "jax": jax_, "os": os_}
    if page == "docs/resume.md":
        layers = {f"layer_{i}": {"kernel": np.full(2, i, np.float32)} for i in range(3)}
        saved = {"params": layers, "opt": {"m": 1}, "rng": jax.random.key(0), "step": 3}
        pc.save("saved", saved | {"opt_state": {}, "loader": {}})
        pc.save("stacked", {"params": {"layers": {"kernel": np.ones((3, 2), np.float32)}}})
        given = {"path": "saved", "stacked": "stacked", "target": None}
        return run | given | {"train_step": _step_with_loss}
    if page == "docs/orbax.md":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path("runs/old/5").absolute(), {"w": np.ones(3)})
    return run


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs_and_raises_what_stands_below_it(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = _what_a_page_takes_for_granted(page)
    blocks = [*PAGES[page], ("", "")]
    for (language, code), (below, text) in itertools.pairwise(blocks):
        if language != "python":
            continue
        block = compile(code, f"{page}: {code}", "exec")
        if text and not below:
            with pytest.raises(pc.CheckpointError) as caught:
                exec(block, names)
            assert f"{type(caught.value).__name__}: {caught.value}\n" == text
        else:
            exec(block, names)
    for name, test in names.items():
        if name.startswith("test_"):
            test(tmp_path)
    assert os.listdir(tmp_path)


def test_every_page_is_reached_from_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(re.findall(r"[\w/]+\.md", menu)) == pages, "mkdocs.yml lists the pages"
