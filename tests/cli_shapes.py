"""What the objects of `--json` are made of: keys, and the type of each value."""

from typing import Any

NUMBER = (int, float, str)
"""Numbers that JSON lacks are text."""
BOX = [[int]]
MESH = {"axis_names": [str], "axis_sizes": [int], "axis_types": [str], "device_ids": [int]}
MANIFEST = {
    "id": str,
    "created": float,
    "leaves": int,
    "nbytes": int,
    "chunks": int,
    "digest": str,
    "meshes": [MESH],
    "process_count": int,
    "device_count": int,
    "platform": str,
    "versions": object,
    "written_by": (str, None),
    "metadata": object,
    "metrics": object,
    "seconds": object,
}
STEP = {"step": int, "name": str, "status": str, "pinned": bool, "note": str}
VALUE = {"type": str, "value": object, "nbytes": int}
ARRAY = {
    "type": str,
    "dtype": str,
    "shape": [int],
    "sharding": (str, None),
    "memory_kind": (str, None),
    "nbytes": int,
}
NODE = {"path": str, "depth": int, "kind": str}
LEAF = {
    "path": str,
    "values": [object],
    "chunks": [{"box": BOX, "nbytes": int, "digest": str, "devices": [int]}],
    "statistics": (
        None,
        {
            "count": int,
            "nan_count": int,
            **dict.fromkeys(("least", "greatest", "mean"), (*NUMBER, None)),
        },
    ),
}
ERROR = {"kind": str, "text": str}
DAMAGE = {
    "path": (str, None),
    "kind": str,
    "text": str,
    "file": (str, None),
    "chunk": ([int], None),
    "box": (BOX, None),
    "devices": [int],
}
REPORT = {
    "path": str,
    "ok": bool,
    "chunks": int,
    "nbytes": int,
    "unchecked": [str],
    "damage": [DAMAGE],
}
DIFFERENCE = {
    "path": (str, None),
    "kind": str,
    "a": (str, None),
    "b": (str, None),
    "values": (None, {"count": int, "max_abs": (*NUMBER, None), "at": [int]}),
}
WHY = [{"step": int, "why": str}]

SHAPES: dict[str, Any] = {
    "ls": {"steps": [{**STEP, "manifest": (MANIFEST, None)}]},
    "tree": {
        "nbytes": int,
        "leaves": int,
        "nodes": [({**NODE, "nbytes": int, "leaves": int}, {**NODE, **ARRAY}, {**NODE, **VALUE})],
    },
    "show": MANIFEST,
    "show LEAF": ({**LEAF, **ARRAY}, {**LEAF, **VALUE}),
    "report": {"file": str},
    "verify": {"checkpoints": [REPORT], "errors": [ERROR]},
    "diff": {
        "same": bool,
        "a": str,
        "b": str,
        "leaves": int,
        "equal_chunks": int,
        "nbytes_read": int,
        "differences": [DIFFERENCE],
    },
    "pin": {"pinned": [str]},
    "unpin": {"unpinned": [str]},
    "prune": {"kept": WHY, "dropped": WHY, "left": WHY, "deleted": [int], "in_use": [int]},
    "convert": {
        "id": (str, None),
        "leaves": [{"path": str, "from": str, "to": str}],
        "passed_over": [str],
        "nbytes_read": int,
        "nbytes_written": int,
        "kept_nbytes": int,
    },
    "export": {"files": [str], "nbytes": int, "left_out": [str]},
    "import": {**MANIFEST, "left_out": [str]},
}
"""A type, None, a list of one shape, a dict that has just these keys; a tuple has alternatives."""


def misfits(value: Any, shape: Any, at: str = "it") -> list[str]:
    """Where a value is not of its shape."""
    if isinstance(shape, tuple):
        return [f"{at} is {value!r}"] if all(misfits(value, one) for one in shape) else []
    if isinstance(shape, list) and isinstance(value, list):
        return [m for n, item in enumerate(value) for m in misfits(item, shape[0], f"{at}[{n}]")]
    if isinstance(shape, dict) and isinstance(value, dict) and shape.keys() == value.keys():
        return [m for key in shape for m in misfits(value[key], shape[key], f"{at}.{key}")]
    fits = shape is object or shape is value is None or type(value) is shape
    return [] if fits else [f"{at} is {value!r}"]
