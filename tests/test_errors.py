"""What errors are beside their text."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.errors import Damage, Mismatch

MISMATCH = Mismatch(path="w", kind="shape", text="shape: saved (1,), wanted (2,)")


@pytest.mark.parametrize(
    "error",
    [
        pc.MismatchError([MISMATCH], leaves=2, remedy="Shapes are never changed."),
        pc.IntegrityError([Damage(path="w", kind="missing", text="w is gone")], note="note"),
        pc.UnsupportedLeafError([("f", "is a function")]),
        pc.PeerTimeoutError("who is missing", missing=[1, 2]),
        pc.PeerError("who failed", failures={1: "a full disk"}),
        pc.NotFoundError("nothing there"),
        pc.ExistsError("something there"),
        pc.FormatError("no checkpoint"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_out_of_another_process_as_it_is(error: pc.CheckpointError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)


def test_an_error_of_a_load_comes_out_of_another_process_as_it_is(tmp_path: Path) -> None:
    pc.save(tmp_path, {"w": np.ones(1)})
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path, {"w": np.ones(2)})
    other = pickle.loads(pickle.dumps(error.value))
    assert other.mismatches == error.value.mismatches
    assert str(other) == str(error.value)
