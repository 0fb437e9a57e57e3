"""Pictures say what is so, fit their place, and obey no name that comes from a file."""

import html.parser
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pytree_ckpt as pc
from pytree_ckpt.pictures.html import document, join, tag
from pytree_ckpt.pictures.layouts import MAX_PANELS, MAX_SIDE, devices_text, layout_of
from pytree_ckpt.pictures.outline import matching, outline
from pytree_ckpt.pictures.pages import MAX_LEAVES, manifest_html, manifest_page
from pytree_ckpt.pictures.treemap import MAX_TILES, Rectangle, squarify, treemap
from pytree_ckpt.plan import patterns
from tests import browser
from tests.conftest import make_mesh

HOSTILE = "<script>alert(1)</script>\"'>&\x1b[31m\u202e]]>"
MESHES = {(8,): ("x",), (4, 2): ("x", "y"), (2, 2, 2): ("x", "y", "z")}


def saved(path: Path, state: Any, **options: Any) -> Any:
    pc.save(path, state, **options)
    return pc.read_manifest(path)


def placed(shape: tuple[int, ...], mesh: tuple[int, ...], *spec: Any) -> jax.Array:
    sharding = NamedSharding(make_mesh(mesh, MESHES[mesh]), P(*spec))
    return jax.device_put(np.zeros(shape, np.float32), sharding)


def rich_state() -> dict[str, Any]:
    """All that a picture has to show, and names that try to break it."""
    return {
        "params": {
            f"layer_{n}": {
                "kernel": placed((64, 32), (4, 2), "x", "y"),
                "bias": placed((32,), (4, 2), "y"),
            }
            for n in range(12)
        },
        "experts": placed((4, 8, 16), (2, 2, 2), "x", "y", "z"),
        "rows": placed((16, 4), (8,), "x"),
        "all": placed((5,), (8,)),
        "both": placed((16, 4), (4, 2), ("y", "x")),
        "host": np.zeros((100, 100)),
        "one": jax.device_put(np.ones(3), jax.devices()[5]),
        "rng": jax.random.key(0),
        HOSTILE: {HOSTILE: 1.5, "x" * 300: np.ones(7)},
        "deep": deep(40),
        "iterator": pc.PerProcess({"at": 3}),
        "none": None,
        "empty": [],
        "step": 10**1000,
    }


def deep(levels: int) -> Any:
    return np.zeros(3) if not levels else {"nested": deep(levels - 1)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "step 1"
    metadata = {"config": {"lr": 0.1}, HOSTILE: HOSTILE, "long": "y" * 500}
    pc.save(path, rich_state(), metadata=metadata)
    return path


# --- layouts --------------------------------------------------------------------------------------

SPECS = [
    ((8,), ("x",)),
    ((8,), (None, "x")),
    ((8,), ()),
    ((4, 2), ("x", "y")),
    ((4, 2), ("y", "x")),
    ((4, 2), (("y", "x"),)),
    ((4, 2), (None, "y")),
    ((2, 2, 2), ("x", "y", "z")),
    ((2, 2, 2), ("z", None, "x")),
    ((2, 2, 2), (("x", "z"), "y")),
]


@pytest.mark.parametrize(("mesh", "spec"), SPECS, ids=str)
def test_a_layout_shows_what_jax_says(
    tmp_path: Path, mesh: tuple[int, ...], spec: tuple[Any, ...]
) -> None:
    array = placed((16, 16, 16), mesh, *spec)
    (leaf,) = saved(tmp_path / "a", {"w": array}).leaves
    layout = layout_of(leaf.spec)
    boxes = {
        device.id: "[" + ", ".join(f"{s.start or 0}:{s.stop or 16}" for s in index) + "]"
        for device, index in array.sharding.devices_indices_map(array.shape).items()
    }
    slices = [block for panel in layout.slices for row in panel.rows for block in row]
    held: dict[str, list[int]] = {}
    for device, box in boxes.items():
        held.setdefault(box, []).append(device)
    assert {b.detail: b.label for b in slices} == {k: devices_text(v) for k, v in held.items()}
    devices = [block for panel in layout.devices for row in panel.rows for block in row]
    assert {int(b.label): b.detail for b in devices} == boxes
    grid = np.array([[int(b.label) for row in p.rows for b in row] for p in layout.devices])
    ids = np.array([device.id for device in array.sharding.mesh.devices.flat])
    assert grid.reshape(-1).tolist() == ids.tolist()
    colours = {block.detail: block.colour for block in slices}
    assert all(block.colour == colours[block.detail] for block in devices)
    assert len(set(colours.values())) == len(colours)


def test_a_host_array_and_a_single_device_have_layouts(tmp_path: Path) -> None:
    one = jax.device_put(np.zeros(3), jax.devices()[5])
    host, single = saved(tmp_path / "a", {"host": np.zeros(3), "one": one}).leaves
    assert layout_of(host.spec).words == "on the host"
    ((block,),) = layout_of(single.spec).slices[0].rows
    assert (block.label, block.detail) == ("5", "[0:3]")


def test_an_array_without_elements_has_a_layout(tmp_path: Path) -> None:
    (leaf,) = saved(tmp_path / "a", {"w": placed((0, 8), (8,), None, "x")}).leaves
    assert layout_of(leaf.spec).words.startswith("each device holds")


def test_a_large_mesh_is_drawn_in_part_and_says_so(tmp_path: Path) -> None:
    from pytree_ckpt.format.arrays import ArraySpec
    from pytree_ckpt.format.shardings import Mesh, Named

    sizes = (64, 32, 8)
    mesh = Mesh(
        axis_names=("a", "b", "c"),
        axis_sizes=sizes,
        axis_types=("Auto",) * 3,
        device_ids=tuple(range(64 * 32 * 8)),
    )
    sharding = Named(mesh=mesh, spec=(("a",), ("b",), ("c",)))
    spec = ArraySpec(
        kind="jax",
        dtype="int8",
        shape=sizes,
        sharding=sharding,
        storage="packed",
        shard_shape=(1, 1, 1),
        chunk_shape=(1, 1, 1),
    )
    layout = layout_of(spec)
    assert "only the first" in layout.note
    for panels in (layout.slices, layout.devices):
        assert len(panels) == MAX_PANELS
        assert all(len(p.rows) <= MAX_SIDE and len(p.rows[0]) <= MAX_SIDE for p in panels)


# --- treemaps -------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=40).map(lambda w: sorted(w)[::-1]),
    st.floats(0.2, 5),
)
def test_areas_are_in_proportion_and_fill_the_place(weights: list[int], aspect: float) -> None:
    whole = Rectangle(left=0.0, top=0.0, width=1.0, height=1.0)
    places = squarify(weights, whole, aspect=aspect)
    areas = [place.width * place.height for place in places]
    np.testing.assert_allclose(areas, np.array(weights) / sum(weights), rtol=1e-6, atol=1e-12)
    for at, a in enumerate(places):
        assert -1e-9 <= a.left <= a.left + a.width <= 1 + 1e-9
        assert -1e-9 <= a.top <= a.top + a.height <= 1 + 1e-9
        for b in places[at + 1 :]:
            across = min(a.left + a.width, b.left + b.width) - max(a.left, b.left)
            down = min(a.top + a.height, b.top + b.height) - max(a.top, b.top)
            assert min(across, down) < 1e-9


def test_tiles_hold_all_bytes_once(checkpoint: Path) -> None:
    manifest = pc.read_manifest(checkpoint)
    tiles = treemap(outline(manifest), aspect=2)
    assert len(tiles) <= MAX_TILES
    assert sum(tile.branch.nbytes for tile in tiles) == manifest.nbytes
    paths = [tile.branch.path for tile in tiles]
    assert not any(a != b and b.startswith(f"{a}/") for a in paths for b in paths)


def test_equal_parts_are_squares() -> None:
    whole = Rectangle(left=0.0, top=0.0, width=1.0, height=1.0)
    assert {(p.width, p.height) for p in squarify([1] * 8, whole, aspect=2.0)} == {(0.25, 0.5)}


# --- outlines -------------------------------------------------------------------------------------


def test_an_outline_sums_what_is_below(checkpoint: Path) -> None:
    manifest = pc.read_manifest(checkpoint)
    root = outline(manifest)
    assert (root.leaves, root.nbytes) == (len(manifest.leaf_codes), manifest.nbytes)
    assert [b.path for _, b in root.walk() if b.leaf] == [leaf.text for leaf in manifest.leaves]
    for _, branch in root.walk():
        if branch.children:
            assert branch.nbytes == sum(child.nbytes for child in branch.children)
            assert branch.leaves == sum(child.leaves for child in branch.children)


def test_only_matching_leaves_are_left(checkpoint: Path) -> None:
    root = matching(outline(pc.read_manifest(checkpoint)), patterns.parse("params/*/bias"))
    assert [b.path for _, b in root.walk() if b.leaf] == [
        leaf.text
        for leaf in pc.read_manifest(checkpoint).leaves
        if re.fullmatch(r"params/[^/]*/bias", leaf.text)
    ]
    assert root.nbytes == 12 * 32 * 4
    nothing = matching(outline(pc.read_manifest(checkpoint)), patterns.parse("nothing"))
    assert (nothing.leaves, nothing.children) == (0, [])


# --- HTML -----------------------------------------------------------------------------------------


class Elements(html.parser.HTMLParser):
    """The elements of a page, each closed by itself."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: set[str] = set()
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@settings(max_examples=50)
@given(st.text(), st.text())
def test_no_text_becomes_an_element(text: str, attribute: str) -> None:
    page = tag("p", text, tag("b", attribute), join(text), title=attribute)
    found = Elements(page)
    assert found.names == ["p", "b"]
    assert found.attributes == {"title"}


def pictures(checkpoint: Path, tmp_path: Path) -> dict[str, str]:
    """Every picture in a notebook, of good and of bad."""
    damaged = tmp_path / "damaged"
    pc.save(damaged, {HOSTILE: np.ones(300_000), "w": np.zeros((512, 512))})
    for file in damaged.glob("data-*/arrays/*/c.*"):
        data = bytearray(file.read_bytes())
        data[3] ^= 1
        file.write_bytes(data)
    with pc.open(checkpoint) as opened:
        return {
            "manifest": pc.read_manifest(checkpoint)._repr_html_(),
            "checkpoint": opened._repr_html_(),
            "verify": pc.verify(checkpoint)._repr_html_(),
            "damaged": pc.verify(damaged)._repr_html_(),
            "same": pc.diff(checkpoint, checkpoint)._repr_html_(),
            "diff": different(tmp_path)._repr_html_(),
        }


def different(tmp_path: Path) -> pc.DiffReport:
    pc.save(tmp_path / "a", {"w": np.zeros(5), HOSTILE: HOSTILE, "x" * 300: 1})
    pc.save(tmp_path / "b", {"w": np.ones(5), HOSTILE: "?", "layer/0": 3}, metadata={HOSTILE: 1})
    return pc.diff(tmp_path / "a", tmp_path / "b")


def test_pictures_need_nothing_and_obey_nothing(checkpoint: Path, tmp_path: Path) -> None:
    pages = pictures(checkpoint, tmp_path)
    pages["page"] = manifest_page(pc.read_manifest(checkpoint), path=f"/a/{HOSTILE}")
    for name, page in pages.items():
        found = Elements(page.removeprefix("<!doctype html>\n"))
        assert not {"script", "img", "iframe", "object", "link"} & set(found.names), name
        assert not {a for a in found.attributes if a.startswith("on") or a in ("src", "href")}
        assert "http:" not in page, name
        assert "https:" not in page, name
        assert "url(" not in page, name
        assert "\x1b" not in page, name
        assert "\u202e" not in page, name
        assert name in ("verify", "same") or "&lt;script&gt;" in page, name


def test_a_page_of_very_many_leaves_is_bounded_and_says_so(tmp_path: Path) -> None:
    few = manifest_html(saved(tmp_path / "a", {f"w{n}": n for n in range(MAX_LEAVES)}))
    many = manifest_html(saved(tmp_path / "b", {f"w{n}": n for n in range(MAX_LEAVES + 7)}))
    assert "more" not in few
    assert "and 7 leaves more" in many
    assert len(many) < len(few) + 200


def test_pictures_are_drawn_without_jax_and_tensorstore(checkpoint: Path) -> None:
    code = (
        "import sys, pytree_ckpt as pc\n"
        f"assert pc.read_manifest({str(checkpoint)!r})._repr_html_()\n"
        "print([m for m in ('jax', 'tensorstore', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- in a browser ---------------------------------------------------------------------------------

needs_chromium = pytest.mark.skipif(
    browser.CHROMIUM is None, reason="no chromium is installed that could draw the page"
)


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_a_report_fits_its_window(checkpoint: Path, tmp_path: Path, width: int) -> None:
    page = manifest_page(pc.read_manifest(checkpoint), path=f"/runs/{'long' * 60}/{HOSTILE}")
    fits(browser.measure(page, width=width, folder=tmp_path), width, "params")


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_notebook_pictures_fit_their_window(checkpoint: Path, tmp_path: Path, width: int) -> None:
    notebook = "".join(pictures(checkpoint, tmp_path).values())
    page = f"<!doctype html><meta charset=utf-8><body style='margin:8px'>{notebook}"
    fits(browser.measure(page, width=width, folder=tmp_path), width, "damaged in 2 places")


def fits(found: browser.Measured, width: int, expected: str) -> None:
    assert found.width == width
    assert expected in found.text
    assert found.texts > 100
    assert found.page <= width
    assert found.cut == []
    assert found.overlaps == []
    assert found.alerts == 0


@needs_chromium
def test_the_measure_sees_what_is_cut_off_and_what_overlaps(tmp_path: Path) -> None:
    style = (
        ".wide {width: 900px} .narrow {width: 40px; overflow: hidden; white-space: nowrap}"
        ".on {position: absolute; top: 0; left: 0}"
    )
    page = document(
        tag("div", "text " * 60, class_="wide"),
        tag("div", "abcdefghijklmnop", class_="narrow"),
        tag("div", "one on the other", class_="on"),
        tag("div", "the other on one", class_="on"),
        title="bad",
        style=style,
    )
    found = browser.measure(page, width=400, folder=tmp_path)
    assert found.page > 400
    assert any(text.startswith("text") for text in found.cut)
    assert "abcdefghijklmnop" in found.cut
    assert ["one on the other", "the other on one"] in found.overlaps
