"""A process of a cluster fails, stops or dies in each phase of a save by all of them.

The others must learn of it in time and with a name, nothing may be half committed, and the same
cluster, or where a process died another one, goes on from what is there.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pytree_ckpt as pc
from pytree_ckpt.jaxio.coordination import Session
from pytree_ckpt.store import writing
from pytree_ckpt.verbs.save_job import SaveJob
from tests import runs
from tests.cluster import Cluster, Dead, Failed
from tests.faults.judge import Tally

TIMEOUT_S = 2.0
"""Of the saves that something befalls."""
HEARTBEAT_S = 20
SPARE_S = 15.0
"""For slow machines; a process without a deadline would take longer by far."""
PATIENCE_S = 60.0
"""Of the saves and loads that nothing befalls."""
BEFORE_THE_OUTCOME = "after its commit, before the others know"
PHASES: dict[str, tuple[Any, str]] = {
    "before it comes": (SaveJob, "run"),
    "while all compare": (SaveJob, "_intent"),
    "before it writes": runs.POINTS["before it writes"],
    "between two files": runs.POINTS["between two files"],
    "before its table": (writing.tables, "to_bytes"),
    "before its commit": runs.POINTS["before its commit"],
    "within its commit": runs.POINTS["within its commit"],
    BEFORE_THE_OUTCOME: (Session, "tell"),
}
OF_PROCESS_0 = ("before its commit", "within its commit", BEFORE_THE_OUTCOME)
FAULTS = ("exception", "ENOSPC", "SIGSTOP", "SIGKILL")


# --- in the members -------------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    """A sharded, a replicated and a local leaf, and one that each process has its own of."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("all",))
    value = np.arange(4096, dtype=np.float32).reshape(16, -1) + step
    return {
        name: jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, spec), lambda index: value[index]
        )
        for name, spec in (("cut", P("all")), ("copied", P()))
    } | {"own": own(step), "step": step}


def own(step: int) -> pc.PerProcess:
    import jax

    return pc.PerProcess({"process": jax.process_index(), "at": step})


def save(root: str, step: int, timeout_s: float = PATIENCE_S) -> None:
    options = pc.SaveOptions(timeout_s=timeout_s)
    with pc.CheckpointManager(root, keep=None, save_options=options) as manager:
        manager.save(step, state(step))


def save_under_fault(root: str, step: int, fault: str, victim: int, phase: str) -> None:
    """As `save`, but something happens to one process in one phase."""
    import jax

    if jax.process_index() != victim:
        return save(root, step, TIMEOUT_S)
    with acting_before(*PHASES[phase], lambda: _strike(fault), only_the_end=phase):
        save(root, step, TIMEOUT_S)
    return None


@contextmanager
def acting_before(
    owner: Any, name: str, action: Callable[[], None], *, only_the_end: str
) -> Iterator[None]:
    call, done = getattr(owner, name), []

    def acting(*args: Any, **kwargs: Any) -> Any:
        told_the_id = only_the_end != BEFORE_THE_OUTCOME or isinstance(args[-1], bytes)
        if told_the_id and not done:
            done.append(True)
            action()
        return call(*args, **kwargs)

    setattr(owner, name, acting)
    try:
        yield
    finally:
        setattr(owner, name, call)


def _strike(fault: str) -> None:
    if fault == "exception":
        raise RuntimeError("the process failed")
    if fault == "ENOSPC":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.kill(os.getpid(), getattr(signal, fault))


def resume(root: str) -> int:
    """Restore the newest step, compare it, save the next one."""
    options = pc.LoadOptions(timeout_s=PATIENCE_S)
    with pc.CheckpointManager(root, keep=None, load_options=options) as manager:
        found = manager.restore(state(0))
    step = int(found["step"])
    if found["own"] != own(step):
        raise RuntimeError(f"{found['own']} is not the value that this process saved")
    for name in ("cut", "copied"):
        for mine, wanted in zip(
            found[name].addressable_shards, state(step)[name].addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(wanted.data))
    save(root, step + 1)
    return step


# --- in the campaign ------------------------------------------------------------------------------


class Clusters:
    """One cluster at a time; a new one where a process has died."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        if self._cluster is not None and not self._cluster.is_alive():
            self.close()
        if self._cluster is None:
            self._cluster = Cluster(2, 2, heartbeat_s=HEARTBEAT_S)
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def campaign(
    clusters: Clusters, root: Path, fault: str, victim: int, phases: Sequence[str]
) -> Tally:
    """Have `fault` befall process `victim` in each phase; prints a line for each."""
    tally = Tally()
    for number, phase in enumerate(phases):
        own = root / f"{fault}-{victim}-{number}"
        try:
            tally.add(_case(clusters, own, fault, victim, phase), where=phase)
        except BaseException:
            clusters.close()  # it may still be busy with what failed
            raise
    return tally


def _case(clusters: Clusters, root: Path, fault: str, victim: int, phase: str) -> Tally:
    tally = Tally(points=1)
    cluster = clusters.get()
    cluster.run(save, str(root), 1)
    started = time.monotonic()
    cluster.begin(save_under_fault, str(root), 2, fault, victim, phase)
    other = cluster.answer(1 - victim)
    seconds = time.monotonic() - started
    if fault == "SIGSTOP":
        os.kill(cluster.members[victim].pid, signal.SIGCONT)
    struck = cluster.answer(victim)
    steps = pc.steps(root)
    print(
        f"    {phase:<42}{fault:<10} in process {victim}: {_words(struck):<20} other: "
        f"{_words(other):<20} {seconds:4.1f} s, root has {steps}",
        flush=True,
    )
    _judge(tally, root, fault, victim, phase, other, struck, seconds)
    resumed = clusters.get().run(resume, str(root))
    if resumed != [steps[-1]] * 2:
        tally.wrong("lost", f"resumed from {resumed}, the root had {steps}")
    strays = [
        str(path) for step in root.iterdir() for path in step.iterdir() if _is_stray(step, path)
    ]
    if strays:
        tally.wrong("leftovers", ", ".join(strays))
    return tally


def _judge(
    tally: Tally,
    root: Path,
    fault: str,
    victim: int,
    phase: str,
    other: Any,
    struck: Any,
    seconds: float,
) -> None:
    """What both processes said of it, and what is in the root."""
    steps = pc.steps(root)
    may_be_there = phase == BEFORE_THE_OUTCOME or (fault, victim) == ("SIGSTOP", 0)
    if steps != [1] and not (steps == [1, 2] and may_be_there):
        tally.wrong("lost" if 1 not in steps else "failed", f"the root has {steps}")
    for step in steps:
        if not pc.verify(pc.step_path(root, step)).ok:
            tally.wrong("broken", f"step {step}")
    if seconds > max(3 * TIMEOUT_S, HEARTBEAT_S) + SPARE_S:
        tally.wrong("failed", f"the other process took {seconds:.0f} s")
    is_named = isinstance(other, Failed) and "CheckpointError" in other.bases
    if not (is_named or isinstance(other, Dead) or (other is None and steps == [1, 2])):
        tally.wrong("failed", f"the other process: {other}")
    if is_named and victim not in {**other.attributes.get("failures", {}), **_missing(other)}:
        tally.wrong("failed", f"not process {victim} is named: {other.text}")
    if fault in ("exception", "ENOSPC") and not isinstance(struck, Failed):
        tally.wrong("failed", f"the process that failed says {struck}")


def _missing(outcome: Failed) -> dict[int, str]:
    return dict.fromkeys(outcome.attributes.get("missing", ()), "no answer")


def _words(outcome: Any) -> str:
    if isinstance(outcome, Dead):
        if outcome.status > 0:
            return f"ended with {outcome.status}"
        return f"ended by {signal.Signals(-outcome.status).name}"
    return outcome.kind if isinstance(outcome, Failed) else "saved"


def _is_stray(step: Path, path: Path) -> bool:
    return path.name not in ("manifest.msgpack", pc.read_manifest(step).data_dir)
