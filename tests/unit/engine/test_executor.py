"""Rank processes: started, fed, noticed when they die, never left behind. Real processes, no model."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdd.engine.batch import NewRow, Row, StepPlan
from pdd.engine.executor import RankExecutor
from pdd.engine.rank_protocol import RankInit, RankProgress
from pdd.errors import (
    EXIT_CONFIG,
    EXIT_DEVICE_MISSING,
    EXIT_ENGINE_DIED,
    EXIT_LIMITS,
    ConfigError,
    EngineError,
    FabricFailure,
    LimitError,
    ModelError,
    PddError,
    RankDied,
)

FAKE_RANK = Path(__file__).parents[2] / "fake_rank.py"
PATIENCE_SECONDS = 20.0

Make = Callable[..., RankExecutor]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RankExecutor] = []

    def make(behaviour: str = "work", world: int = 1, **options: object) -> RankExecutor:
        init = RankInit(model_dir="nowhere", num_pages=9, world=world)
        options = {"step_timeout": PATIENCE_SECONDS, "start_timeout": PATIENCE_SECONDS} | options
        executor = RankExecutor(
            init, command=lambda fd: [sys.executable, str(FAKE_RANK), str(fd), behaviour], **options  # type: ignore[arg-type]
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()
        assert not executor._keeper.is_alive()
        for rank in executor._ranks:
            assert rank.process.returncode is not None


def plan(step: int = 0) -> StepPlan:
    row = Row(row_id=5, tokens=(1,), start=0, new_pages=(0,), sample=True)
    return StepPlan(step, (), (NewRow(5, (1,), (), None),), (row,))


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} still lives")


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_gets_each_step_and_the_first_answers(make: Make, world: int) -> None:
    progress: list[tuple[int, RankProgress]] = []
    executor = make(world=world, on_progress=lambda rank, what: progress.append((rank, what)))
    infos = executor.start()
    assert [info.ready.rank for info in infos] == list(range(world))
    assert [info.counter_fd is not None for info in infos] == [True] + [False] * (world - 1)
    assert infos[0].ready.num_pages == 9
    assert [rank for rank, _ in progress] == list(range(world))
    for step in range(3):
        result = executor.execute(plan(step))
        assert (result.step, result.sampled[0].tokens) == (step, (7,))
    for info in infos:
        os.fstat(info.kv_fd)


def test_close_is_quiet_and_idempotent_and_closes_the_fds(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make()
    (info,) = executor.start()
    deaths: list[RankDied] = []
    executor.watch(deaths.append)
    executor.close()
    executor.close()
    assert executor._ranks[0].process.returncode == 0
    assert deaths == []
    assert not caplog.records
    for fd in (info.kv_fd, info.counter_fd):
        assert fd is not None
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_rank_that_ignores_shutdown_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.engine.executor.SHUTDOWN_SECONDS", 0.3)
    executor = make("ignore shutdown")
    executor.start()
    executor.close()
    executor._ranks[0].process.wait(PATIENCE_SECONDS)
    assert executor._ranks[0].process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("error_id", "kind", "exit_code"),
    [("E780", ConfigError, EXIT_CONFIG), ("E781", ModelError, EXIT_CONFIG), ("E770", LimitError, EXIT_LIMITS),
     ("E520", FabricFailure, EXIT_DEVICE_MISSING), ("E750", EngineError, EXIT_ENGINE_DIED),
     ("E-of-a-later-release", EngineError, EXIT_ENGINE_DIED)],
)
def test_a_start_that_fails_says_what_the_rank_said(
    make: Make, error_id: str, kind: type[PddError], exit_code: int
) -> None:
    with pytest.raises(PddError, match="not a checkpoint") as caught:
        make(f"fail in start {error_id}").start()
    assert type(caught.value) is kind
    assert (caught.value.exit_code, caught.value.hint) == (exit_code, "look again")


def test_a_rank_that_dies_in_its_start_is_explained(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RankDied, match="exited with status 3: file or directory"):
        make("die in start").start()
    assert "rank 0: no such" in caplog.text


def test_a_start_is_bounded(make: Make) -> None:
    executor = make("hang in start", start_timeout=0.3)
    with pytest.raises(RankDied, match=r"its start within 0\.3 s"):
        executor.start()


def test_a_start_can_be_given_up_from_another_thread(make: Make) -> None:
    executor = make("hang in start")
    timer = threading.Timer(0.3, executor.close)
    timer.start()
    with pytest.raises(RankDied):
        executor.start()
    timer.join()


def test_missing_descriptors_are_an_error(make: Make) -> None:
    with pytest.raises(EngineError, match="0 descriptors instead of 2"):
        make("no fds").start()


def test_a_command_that_does_not_exist(make: Make) -> None:
    executor = RankExecutor(RankInit("x"), step_timeout=1, command=lambda fd: ["/nonexistent/python"])
    with pytest.raises(EngineError, match="cannot be started"):
        executor.start()


def test_a_rank_that_dies_in_a_step(make: Make) -> None:
    executor = make("die in step")
    executor.start()
    deaths: list[RankDied] = []
    executor.watch(deaths.append)
    with pytest.raises(RankDied, match="was killed by SIGKILL") as caught:
        executor.execute(plan())
    executor._keeper.join(PATIENCE_SECONDS)
    assert deaths == [caught.value]


def test_a_rank_that_hangs_in_a_step_is_killed(make: Make) -> None:
    executor = make("hang in step", step_timeout=0.3)
    executor.start()
    deaths: list[RankDied] = []
    executor.watch(deaths.append)
    with pytest.raises(RankDied, match=r"did not finish step 0 within 0\.3 s") as caught:
        executor.execute(plan())
    executor._keeper.join(PATIENCE_SECONDS)
    assert deaths == [caught.value]


@pytest.mark.parametrize(
    ("behaviour", "words"), [("fail in step", "out of memory"), ("answer wrongly", "answered step")]
)
def test_a_step_that_fails(make: Make, behaviour: str, words: str) -> None:
    executor = make(behaviour)
    executor.start()
    with pytest.raises(EngineError, match=words):
        executor.execute(plan())


@pytest.mark.parametrize("world", [1, 2])
def test_a_death_is_told_while_no_step_runs(make: Make, world: int) -> None:
    executor = make(world=world)
    executor.start()
    told = threading.Event()
    deaths: list[RankDied] = []
    executor.watch(lambda death: (deaths.append(death), told.set()))
    os.kill(executor._ranks[-1].process.pid, signal.SIGKILL)
    assert told.wait(PATIENCE_SECONDS)
    assert f"rank {world - 1}" in str(deaths[0])
    assert "SIGKILL" in str(deaths[0])
    late: list[RankDied] = []
    executor.watch(late.append)
    assert late == deaths


def test_ranks_do_not_outlive_a_daemon_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "daemon.py"
    script.write_text(textwrap.dedent(f"""
        import sys, time
        from pdd.engine.executor import RankExecutor
        from pdd.engine.rank_protocol import RankInit
        executor = RankExecutor(RankInit("x", num_pages=9, world=2), step_timeout=9,
                                command=lambda fd: [sys.executable, {str(FAKE_RANK)!r}, str(fd), "work"])
        print(*(info.ready.pid for info in executor.start()), flush=True)
        time.sleep(1000)
    """))
    daemon = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert daemon.stdout
    assert select.select([daemon.stdout], [], [], PATIENCE_SECONDS)[0]
    pids = [int(word) for word in daemon.stdout.readline().split()]
    assert len(pids) == 2
    daemon.kill()
    daemon.wait()
    daemon.stdout.close()
    for pid in pids:
        wait_gone(pid)
