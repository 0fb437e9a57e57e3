"""Jobs in batches: every one runs once, results keep their order, a failure is the first one's."""

import threading
from functools import partial

import pytest

from pytree_ckpt.store import arrays
from pytree_ckpt.store.workers import Batch, Workers
from tests.gates import PATIENCE_S


def fail(number: int) -> int:
    raise ValueError(number)


@pytest.fixture(params=[0, 1, 3], ids=lambda count: f"{count} threads")
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Threads; none where the system lets none be started."""
    threads: int = request.param
    if not threads:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
    return threads or 2


def test_results_are_in_the_order_of_the_jobs(count: int) -> None:
    with Workers(count, "test", all_or_nothing=True) as pool:
        batches = [pool.submit(partial(pow, n, 2) for n in range(size)) for size in (0, 1, 50)]
        assert [batch.results() for batch in batches] == [[], [0], [n * n for n in range(50)]]


def test_every_failure_is_told_and_the_first_is_raised(count: int) -> None:
    with Workers(count, "test", all_or_nothing=False) as pool:
        batch = pool.submit(partial(fail if n % 2 else abs, n) for n in range(6))
        assert [failure.args for failure in batch.failures()] == [(1,), (3,), (5,)]
        with pytest.raises(ValueError, match=r"^1$"):
            batch.results()


def test_after_a_failure_nothing_begins_and_no_batch_looks_whole(count: int) -> None:
    begun: list[int] = []
    with Workers(count, "test", all_or_nothing=True) as pool:
        assert pool.submit([partial(fail, 7)]).failures()
        later: Batch[None] = pool.submit([partial(begun.append, 1)])
        with pytest.raises(ValueError, match=r"^7$"):
            later.results()
    assert not begun


def test_jobs_that_have_not_begun_are_dropped_at_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, begun = threading.Event(), threading.Event()
    ran: list[int] = []
    join = threading.Thread.join

    def first() -> None:
        begun.set()
        may_end.wait()

    def end_and_join(thread: threading.Thread) -> None:
        may_end.set()
        join(thread)

    with Workers(1, "test", all_or_nothing=False) as pool:
        pool.submit([first])
        begun.wait()
        pool.submit(partial(ran.append, n) for n in range(3))
        monkeypatch.setattr(threading.Thread, "join", end_and_join)
    assert not ran


def test_who_is_interrupted_while_threads_start_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that waits for jobs for ever would keep the interpreter from its end."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), Workers(3, "test", all_or_nothing=True):
        pass
    for thread in started:
        thread.join(PATIENCE_S)
    assert [thread.is_alive() for thread in started] == [False, False]


def test_the_threads_of_tensorstore_outlive_a_read_and_its_cache_does_not() -> None:
    one, other = (arrays.context(threads=2) for _ in range(2))
    for pool in ("data_copy_concurrency", "file_io_concurrency"):
        assert one[pool] == other[pool] != arrays.context(threads=3)[pool]
    assert one["cache_pool"] != other["cache_pool"]
