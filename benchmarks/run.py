"""Measure saves and loads of this library, of what else there is, and of the machine.

    python benchmarks/run.py                                  # everything; hours
    python benchmarks/run.py --workload a,b --dir tmpfs       # some of it
    python benchmarks/run.py --show results.json --png b.png  # tables and chart of an earlier run

Every save and every load is a process of its own (`one.py`). Systems take turns: each once a
round, in an order that rotates, so that a slow minute of the machine burdens all of them. A
checkpoint is deleted before the next system writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import results as results_of
import tables
from limit import thread_count
from results import Results, Verb
from systems import SYSTEMS
from workloads import MIB, Workload, workloads

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "pytree-ckpt",
    "jax",
    "jaxlib",
    "numpy",
    "tensorstore",
    "orbax-checkpoint",
    "safetensors",
    "torch",
    "xxhash",
)
ROWS = ("planning", "manifest")
"""What is measured besides states."""
OF_ALL = ("cpu_s", "peak_nbytes", "read_nbytes", "device_read_nbytes", "key_values")
OF_THE_MOST = ("seconds", "barriers", "collectives", "blocking_gets")
"""Figures of several processes: their sum, or the largest. Of all others that of process 0."""
TIMEOUT_S = 1800
IMPORT_ROUNDS = 11


def main() -> int:
    """Measure, show and write; fails if a process failed, not if a target is missed."""
    arguments = _arguments()
    out = tables.console()
    # A stop asked for is an exception, so that nothing stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.show:
        results = results_of.read(arguments.show)
        tables.show_all(out, results)
    else:
        results = _start(arguments)
        tables.show_setting(out, results)
        _measure_all(arguments, results, out)
        tables.show_verdict(out, results)
    if arguments.png:
        _draw(results, arguments.png, out)
    return 1 if results.errors() else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="all", help=f"of {','.join((*workloads(), *ROWS))}")
    parser.add_argument("--systems", default="", help=f"of {','.join(SYSTEMS)}, or all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default="tmpfs,disk", help="tmpfs, disk, or folders")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a trial run")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--png", type=Path, help="draw a chart, one file for each place")
    parser.add_argument("--append", action="store_true", help="keep what --json already has")
    parser.add_argument("--show", type=Path, help="measure nothing: show this JSON")
    parser.add_argument("--cold", action="store_true", help="no small save and load first")
    return parser.parse_args()


def _measure_all(arguments: argparse.Namespace, results: Results, out: Any) -> None:
    everything = workloads(arguments.scale)
    known = [*everything, *ROWS]
    chosen = known if arguments.workload == "all" else arguments.workload.split(",")
    for name in chosen:
        if name not in known:
            raise SystemExit(f"there is no workload {name!r}; there are {', '.join(known)}")
    if "planning" in chosen:
        _measure_planning(arguments, results)
    if "manifest" in chosen:
        _measure_manifest_only(results)
    for place, folder in _places(arguments.dir, results):
        with _scratch(folder) as scratch:
            for key in (name for name in chosen if name in everything):
                _measure_workload(arguments, results, place, scratch, everything[key], out)
                if arguments.json:
                    results.write(arguments.json)
                tables.show_workload(out, results, place, key)
    if arguments.json:
        results.write(arguments.json)


def _measure_workload(
    arguments: argparse.Namespace,
    results: Results,
    place: str,
    scratch: Path,
    workload: Workload,
    out: Any,
) -> None:
    results.forget(place, workload.key)
    results.states[workload.key] = {
        "title": workload.title,
        "nbytes": workload.nbytes,
        "processes": workload.processes,
    }
    if lack := _lack_of_space(scratch, workload):
        results.skipped.append(f"{place} ({workload.key}) skipped: {lack}")
        return
    names = _systems(arguments.systems, workload, results)
    for number in range(arguments.rounds):
        turn = number * len(names) // arguments.rounds
        for name in names[turn:] + names[:turn]:
            path = scratch / "ckpt"
            for verb in workload.verbs:
                found = _one(arguments, verb, name, workload, path, check=number == 0)
                where = {"place": place, "workload": workload.key, "system": name}
                results.measurements.append({**where, "round": number, "verb": verb, **found})
                said = found.get("error") or f"{found['seconds']:.3f} s"
                progress = f"{place} ({workload.key}) round {number + 1} of {arguments.rounds}"
                out.print(f"{progress}: {name} {verb} {said}", markup=False)
                if "error" in found:
                    break
            shutil.rmtree(path, ignore_errors=True)


def _one(
    arguments: argparse.Namespace,
    verb: Verb,
    system: str,
    workload: Workload,
    path: Path,
    *,
    check: bool,
) -> dict[str, Any]:
    """Figures of one save or load, or the `error`."""
    command = [sys.executable, str(HERE / "one.py"), verb, "--system", system]
    command += ["--workload", workload.key, "--path", str(path), "--scale", str(arguments.scale)]
    command += ["--cold"] * arguments.cold + ["--check"] * check
    if workload.processes == 1:
        return _figures(command)
    with socket.create_server(("127.0.0.1", 0)) as free:
        command += ["--coordinator", f"127.0.0.1:{free.getsockname()[1]}"]
    with ThreadPoolExecutor(workload.processes) as pool:
        numbered = [[*command, "--process", str(n)] for n in range(workload.processes)]
        return _together(list(pool.map(_figures, numbered)))


def _figures(command: list[str]) -> dict[str, Any]:
    """What a process measures, or the `error`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {TIMEOUT_S} s"}
    if done.returncode < 0:
        return {"error": f"killed by {signal.Signals(-done.returncode).name}"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if re.match(r"[\w.]+: ", line)]
        return {"error": said[-1][:300] if said else f"exit code {done.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several processes as those of one run."""
    if failed := [one for one in found if "error" in one]:
        return failed[0]
    summed = {name: sum(one[name] for one in found) for name in OF_ALL}
    return found[0] | summed | {name: max(one[name] for one in found) for name in OF_THE_MOST}


def _systems(asked: str, workload: Workload, results: Results) -> list[str]:
    """What is measured: as asked, else what the workload names; only what is installed."""
    if asked == "all":
        names = list(SYSTEMS)
    elif asked:
        names = asked.split(",")
    else:
        names = list(workload.systems or SYSTEMS)
    for name in names:
        if name not in SYSTEMS:
            raise SystemExit(f"there is no system {name!r}; there are {', '.join(SYSTEMS)}")
        missing = SYSTEMS[name].missing()
        said = f"{name} skipped: {missing} is not installed"
        if missing and said not in results.skipped:
            results.skipped.append(said)
    return [name for name in names if not SYSTEMS[name].missing()]


# --- places ---------------------------------------------------------------------------------


def _places(asked: str, results: Results) -> Iterator[tuple[str, Path]]:
    """Name and folder of each place to write to."""
    for name in asked.split(","):
        folder = {"tmpfs": _tmpfs, "disk": _disk}.get(name, lambda name=name: Path(name))()
        if folder is None or not folder.is_dir():
            results.skipped.append(f"{name} skipped: there is no such place here")
            continue
        results.places[name] = _file_system(folder)
        yield name, folder


def _tmpfs() -> Path | None:
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and _file_system(folder) == "tmpfs" else None


def _disk() -> Path | None:
    candidates = (Path(tempfile.gettempdir()), Path.home(), Path.cwd())
    return next((f for f in candidates if _file_system(f) not in ("tmpfs", "ramfs")), None)


def _file_system(folder: Path) -> str:
    """Type of the file system that a folder is on."""
    found, longest = "unknown", -1
    path = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        below = path == mount or path.startswith(mount.rstrip("/") + "/")
        if below and len(mount) >= longest:
            found, longest = kind, len(mount)
    return found


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    scratch = Path(tempfile.mkdtemp(prefix="pytree_ckpt_bench_", dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _lack_of_space(folder: Path, workload: Workload) -> str | None:
    """Why a workload does not fit. Peers write more than the state, and need memory beside it."""
    room = workload.nbytes * 5 // 4 + 256 * MIB
    free = shutil.disk_usage(folder).free
    memory = 2 * workload.nbytes + 1024 * MIB
    if _file_system(folder) == "tmpfs":
        memory += room
    available = _memory("MemAvailable")
    if free < room:
        return f"needs {room >> 20} MiB of space, {free >> 20} are free"
    if available < memory:
        return f"needs {memory >> 20} MiB of memory, {available >> 20} are available"
    return None


# --- rows without arrays --------------------------------------------------------------------


def _measure_planning(arguments: argparse.Namespace, results: Results) -> None:
    """Seconds of the pure plans, as `scale.py` measures them."""
    command = [sys.executable, str(HERE / "scale.py"), "--plans", "--scale", str(arguments.scale)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results.planning = json.loads(done.stdout)


def _measure_manifest_only(results: Results) -> None:
    """A process that only reads the manifest of a state of 445 leaves."""
    gpt2 = workloads(0.002)["b"]
    with tempfile.TemporaryDirectory(prefix="pytree_ckpt_bench_") as folder:
        path = Path(folder) / "ckpt"
        small = argparse.Namespace(scale=0.002, cold=True)
        found = _one(small, "save", "ours-sha256", gpt2, path, check=False)
        if "error" in found:
            raise SystemExit(f"cannot save a state: {found['error']}")
        work = "import sys, pytree_ckpt; pytree_ckpt.read_manifest(sys.argv[1])"
        show = "; print(*(m for m in ('jax', 'jaxlib', 'tensorstore') if m in sys.modules))"
        imported = subprocess.run(
            [sys.executable, "-c", work + show, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split()
        results.manifest_only = {
            "seconds": _process_seconds(work, str(path)),
            "empty_s": _process_seconds("pass"),
            "imported": imported,
        }


def _process_seconds(code: str, *arguments: str) -> float:
    taken = []
    for _ in range(IMPORT_ROUNDS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, *arguments], check=True)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


# --- the report -----------------------------------------------------------------------------


def _start(arguments: argparse.Namespace) -> Results:
    """Results with nothing measured yet, or those of the file to append to."""
    fresh = Results(
        machine={
            "cpu": _cpu(),
            "threads": thread_count(),
            "memory_gib": _memory("MemTotal") / (1 << 30),
            "system": f"{platform.system()} {platform.release()}",
        },
        versions=_versions(),
        settings={name: system.settings for name, system in SYSTEMS.items()},
        scale=arguments.scale,
        started=time.strftime("%Y-%m-%d %H:%M"),
    )
    if not (arguments.append and arguments.json and arguments.json.exists()):
        return fresh
    kept = results_of.read(arguments.json)
    if (kept.scale, kept.versions) != (fresh.scale, fresh.versions):
        raise SystemExit(f"{arguments.json} has another scale or other versions; do not mix them")
    kept.skipped = []
    return kept


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ", 1)[1]
    return platform.machine()


def _memory(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


def _draw(results: Results, png: Path, out: Any) -> None:
    import chart

    for place in results.places:
        name = Path(place).name if os.sep in place else place
        path = png if len(results.places) == 1 else png.with_stem(f"{png.stem}-{name}")
        chart.draw(results, place, path)
        out.print(f"drawn: {path}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
