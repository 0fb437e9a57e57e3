"""One measurement: save or load one state with one system, in this process and once.

Prints one line of JSON. `run.py` starts a process of this for every number in its tables, so that
no measurement meets another's caches, pools or leaks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import os
import re
import resource
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import workloads
from coordination import Asked
from systems import SYSTEMS, Adapter
from workloads import Leaf, Workload

SAVES, STEPS = 3, 5
"""In the background of a loop, and steps that are timed without one."""


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("save", "load", "background"))
    parser.add_argument("--system", required=True, choices=SYSTEMS)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--path", required=True, type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument(
        "--cold", action="store_true", help="do not save and load a small one first"
    )
    parser.add_argument("--check", action="store_true", help="compare what was loaded, bit for bit")
    parser.add_argument("--process", type=int, default=0, help="of those that share the devices")
    parser.add_argument("--coordinator", help="address where they meet")
    arguments = parser.parse_args()
    _die_first_without_memory()
    workload = workloads.workloads(arguments.scale)[arguments.workload]
    _use_cpu_devices(workloads.DEVICES // workload.processes)
    asked = None
    if workload.processes > 1:
        asked = _join(arguments.coordinator, workload.processes, arguments.process)
    adapter = SYSTEMS[arguments.system].make()
    if not arguments.cold:
        _warm_up(adapter, workload, arguments.path.with_name("warm"), asked)
    if arguments.verb == "save":
        result = _save(adapter, workload, arguments.path, asked)
    elif arguments.verb == "background":
        result = _background(adapter, workload, arguments.path)
    else:
        result = _load(adapter, workload, arguments.path, asked, check=arguments.check)
    adapter.close()
    print(json.dumps(result))


def _join(coordinator: str, processes: int, process: int) -> Asked:
    """Become one of several processes."""
    import jax

    jax.distributed.initialize(coordinator, processes, process)
    jax.devices()
    return Asked()


def _save(adapter: Adapter, workload: Workload, path: Path, asked: Asked | None) -> dict[str, Any]:
    state = adapter.prepare(workloads.build(workload))
    with _library_log() as log, _measured(asked) as result:
        adapter.save(path, state)
    result.update(_log_figures(log), **_on_disk(path), sync_s=_sync(path))
    return result


def _load(
    adapter: Adapter, workload: Workload, path: Path, asked: Asked | None, *, check: bool
) -> dict[str, Any]:
    import jax

    target = workloads.target(workload)
    _forget_pages(path)
    with _library_log() as log, _measured(asked) as result:
        loaded = adapter.load(path, target, reshard=workload.is_reshard)
        jax.block_until_ready(loaded)
    result.update(_log_figures(log))
    if check and loaded is not None:
        workloads.check(workload, loaded)
    if log and workload.is_reshard:
        import amplification

        result["amplification"] = amplification.by_device(path, target)
    return result


def _background(adapter: Adapter, workload: Workload, path: Path) -> dict[str, Any]:
    """How long a loop is blocked by saves in the background, and how long its steps take beside.

    A step donates the state and makes the next, as an optimizer does.
    """
    import jax

    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = workloads.build(workload)

    def timed_step() -> float:
        nonlocal state
        started = time.perf_counter()
        state = jax.block_until_ready(step(state))
        return time.perf_counter() - started

    timed_step()
    alone = [timed_step() for _ in range(STEPS)]
    blocked, beside, taken = [], [], []
    for _ in range(SAVES):
        started = time.perf_counter()
        wait = adapter.start(path, state)
        blocked.append(time.perf_counter() - started)
        waiting = threading.Thread(target=wait)
        waiting.start()
        while waiting.is_alive():
            beside.append(timed_step())
        taken.append(time.perf_counter() - started)
        shutil.rmtree(path)
    return {
        "seconds": statistics.median(taken),
        "blocked_s": statistics.median(blocked),
        "step_s": statistics.median(alone),
        "beside_s": statistics.median(beside),
    }


def _warm_up(adapter: Adapter, workload: Workload, folder: Path, asked: Asked | None) -> None:
    """Save and load a small state of other shapes: what is imported and started once.

    A training run saves many times, so this is not what a save costs; and it costs the peers more
    than us.
    """
    spec = (workload.mesh[0][0],)
    leaves = (
        Leaf(path=("large",), shape=(8 << 7, 2 << 10), spec=spec),
        Leaf(path=("small",), shape=(56, 3), spec=spec),
    )
    small = replace(workload, leaves=leaves, target_mesh=None)
    folder.mkdir(exist_ok=True)
    try:
        adapter.save(folder / "ckpt", adapter.prepare(workloads.build(small)))
        adapter.load(folder / "ckpt", workloads.target(small), reshard=False)
        if asked is not None:
            asked.meet()
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # by several at once


# --- the process ----------------------------------------------------------------------------


def _use_cpu_devices(number: int) -> None:
    """So many devices on the CPU, before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    count = f"--xla_force_host_platform_device_count={number}"
    os.environ["XLA_FLAGS"] = f"{flags} {count}".strip()


def _die_first_without_memory() -> None:
    """A peer that takes all memory must not take down anything else on the machine."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


@contextlib.contextmanager
def _measured(asked: Asked | None) -> Iterator[dict[str, Any]]:
    """Seconds, CPU seconds, peak memory above what there was, and bytes read by system calls.

    Of several processes also what they ask of each other, from when all have come here.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    result: dict[str, Any] = {}
    if asked is not None:
        asked.meet()
        asked.counter.clear()
    before = _counters()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS
    memory = _status("VmRSS")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    yield result
    result["seconds"] = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    result["peak_nbytes"] = max(_status("VmHWM") - memory, 0)
    result["cpu_s"] = used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime
    after = _counters()
    result["read_nbytes"] = after["rchar"] - before["rchar"]
    result["device_read_nbytes"] = after["read_bytes"] - before["read_bytes"]
    if asked is not None:
        asked.meet()
        result.update(asked.figures())


def _counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _status(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


# --- the files ------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def _on_disk(path: Path) -> dict[str, int]:
    sizes = [file.stat().st_size for file in _files(path)]
    return {"disk_nbytes": sum(sizes), "disk_files": len(sizes)}


def _sync(path: Path) -> float:
    """Seconds to sync what a save left unsynced; nothing of it burdens who comes next."""
    started = time.perf_counter()
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started


def _forget_pages(path: Path) -> None:
    """Drop a checkpoint from the page cache. Needs no rights; does nothing on tmpfs."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# --- what the library says about itself -----------------------------------------------------


@contextlib.contextmanager
def _library_log() -> Iterator[list[str]]:
    """The lines that the library logs about saves and loads; peers log none."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pytree_ckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def _log_figures(lines: list[str]) -> dict[str, Any]:
    """Bytes and chunks read, and seconds by stage."""
    figures: dict[str, Any] = {}
    for line in lines:
        if read := re.search(r"(\d+) bytes in (\d+) chunks", line):
            figures["own_read_nbytes"], figures["own_read_chunks"] = map(int, read.groups())
        if stages := re.findall(r"([a-z][a-z ]*?) (\d+\.\d+) s\b", line):
            figures["stages"] = {name: float(seconds) for name, seconds in stages}
    return figures


if __name__ == "__main__":
    sys.exit(main())
