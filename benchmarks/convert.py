"""Convert a checkpoint offline: peak memory of the whole process, and time beside a plain copy.

Half of the state goes from a 4×2 mesh to 2×4, half from rows to columns, all of it to bfloat16,
with sha256 on both sides. Each figure is from a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
MAX_PEAK_MB = 400
MAX_RATIO = 3.0


def main() -> int:
    """Measure, print, and say whether it is within the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=3.0, help="size of the state")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where to work")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        STEPS[arguments.step](arguments.dir, arguments.gb)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="pytree_ckpt-convert-") as folder:
        run = lambda step: _run(step, Path(folder), arguments.gb)  # noqa: E731
        run("save")
        copy, hashed, converted = run("copy"), run("hashed_copy"), run("convert")
        run("check")
    peak = converted["peak_nbytes"] / 1e6
    ratio = converted["seconds"] / copy["seconds"]
    print(f"{converted['read_nbytes'] / 1e9:.2f} GB read, {converted['nbytes'] / 1e9:.2f} written")
    print(f"plain copy            {copy['seconds']:7.2f} s")
    print(f"copy with sha256      {hashed['seconds']:7.2f} s")
    beside = converted["seconds"] / hashed["seconds"]
    times = f"{ratio:.2f} × the plain copy, {beside:.2f} × that with sha256"
    print(f"convert               {converted['seconds']:7.2f} s   {times}")
    print(f"peak of the process   {peak:7.0f} MB")
    good = peak <= MAX_PEAK_MB and ratio <= MAX_RATIO
    verdict = "kept" if good else "MISSED"
    print(f"bounds: {MAX_PEAK_MB} MB, {MAX_RATIO:.0f} × the plain copy: {verdict}")
    return 0 if good else 1


def _run(step: str, folder: Path, gb: float) -> dict[str, float]:
    command = [sys.executable, __file__, "--step", step, "--dir", str(folder), "--gb", str(gb)]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def _report(started: float, **figures: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak_nbytes": peak, **figures}))


# --- what is converted ----------------------------------------------------------------------


def _save(folder: Path, gb: float) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import workloads
    from workloads import FOUR_BY_TWO, Leaf, Workload

    import pytree_ckpt as pc

    columns = 4096
    rows = round(gb * 1e9 / 12 / 4 / columns / 8) * 8
    leaves = [
        Leaf(path=(kind, f"w{n}"), shape=(rows, columns), spec=spec)
        for kind, spec in (("tiles", ("data", "model")), ("rows", (("data", "model"),)))
        for n in range(6)
    ]
    work = Workload(key="convert", title="", leaves=tuple(leaves), mesh=FOUR_BY_TWO)
    started = time.perf_counter()
    pc.save(folder / "src", workloads.build(work))
    _report(started)


def _convert(folder: Path, _: float) -> None:
    started = time.perf_counter()
    import pytree_ckpt as pc

    layout = pc.Layout(mesh={"data": 2, "model": 4}, specs={"rows/*": "None,data+model"})
    report = pc.convert(folder / "src", folder / "dst", layout=layout, dtype={"**": "bfloat16"})
    if "jax" in sys.modules:
        raise RuntimeError("a conversion imports JAX")
    read, written = report.plan.nbytes_read, report.plan.nbytes_written
    _report(started, read_nbytes=read, nbytes=written)


def _check(folder: Path, _: float) -> None:
    """Both checkpoints, as numpy: equal to the last bit."""
    import ml_dtypes

    import pytree_ckpt as pc

    started = time.perf_counter()
    with pc.open(folder / "src") as old, pc.open(folder / "dst") as new:
        for key in old:
            wanted, found = old[key][:].astype(ml_dtypes.bfloat16), new[key][:]
            if found.dtype != wanted.dtype or found.tobytes() != wanted.tobytes():
                raise RuntimeError(f"{key} is not what it was")
    _report(started)


# --- a copy of the same bytes ---------------------------------------------------------------


def _copy(folder: Path, _: float) -> None:
    _copy_files(folder, hashed=False)


def _hashed_copy(folder: Path, _: float) -> None:
    _copy_files(folder, hashed=True)


def _copy_files(folder: Path, *, hashed: bool) -> None:
    """Each file read, written and synced, 1 MiB at a time, on as many threads as a conversion."""
    started = time.perf_counter()
    source, target = folder / "src", folder / f"copy-{hashed}"
    files = [file for file in source.rglob("*") if file.is_file()]
    memory = threading.local()

    def copy(file: Path) -> None:
        if not hasattr(memory, "buffer"):
            memory.buffer = memoryview(bytearray(MIB))
        there = target / file.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        read, written = hashlib.sha256(), hashlib.sha256()
        with file.open("rb", buffering=0) as old, there.open("wb", buffering=0) as new:
            while count := old.readinto(memory.buffer):
                if hashed:
                    read.update(memory.buffer[:count])
                    written.update(memory.buffer[:count])
                new.write(memory.buffer[:count])
            os.fsync(new.fileno())

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(copy, files):
            pass
    _report(started)
    for file in files:
        (target / file.relative_to(source)).unlink()


STEPS = {
    "save": _save,
    "copy": _copy,
    "hashed_copy": _hashed_copy,
    "convert": _convert,
    "check": _check,
}

if __name__ == "__main__":
    sys.exit(main())
