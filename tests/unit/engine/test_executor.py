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
    RanksDisagree,
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
        assert not executor._keeper._thread.is_alive()
        for rank in executor._keeper.ranks:
            assert rank.process.returncode is not None


def plan(step: int = 0, num_tokens: int = 1) -> StepPlan:
    row = Row(row_id=5, tokens=(1,) * num_tokens, start=0, new_pages=(0,), sample=True)
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


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_each_step_and_the_first_answers(make: Make, world: int) -> None:
    progress: list[tuple[int, RankProgress]] = []
    executor = make(world=world, on_progress=lambda rank, what: progress.append((rank, what)))
    infos = executor.start()
    assert [info.ready.rank for info in infos] == list(range(world))
    assert [info.counter_fd is not None for info in infos] == [True] + [False] * (world - 1)
    assert infos[0].ready.num_pages == 9
    assert sorted(rank for rank, _ in progress) == list(range(world))
    for step in range(3):
        result = executor.execute(plan(step))
        assert (result.step, result.sampled[0].tokens, result.seconds) == (step, (7,), 0.5)
    for info in infos:
        os.fstat(info.kv_fd)


def test_close_is_quiet_and_idempotent_and_closes_the_fds(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make()
    (info,) = executor.start()
    deaths: list[RankDied] = []
    executor.watch(deaths.append)
    executor.close()
    executor.close()
    assert executor._keeper.ranks[0].process.returncode == 0
    assert deaths == []
    assert not caplog.records
    for fd in (info.kv_fd, info.counter_fd):
        assert fd is not None
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_rank_that_ignores_shutdown_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.engine.rank_keeper.SHUTDOWN_SECONDS", 0.3)
    executor = make("ignore shutdown")
    executor.start()
    executor.close()
    executor._keeper.ranks[0].process.wait(PATIENCE_SECONDS)
    assert executor._keeper.ranks[0].process.returncode == -signal.SIGKILL


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


def test_the_log_says_whose_rank_it_is_where_the_node_has_other_groups(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PddError):
        make("die in start", name="group 1").start()
    assert "group 1 rank 0: no such" in caplog.text
    assert "group 1 rank 0 (pid " in caplog.text


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
    executor._keeper._thread.join(PATIENCE_SECONDS)
    assert deaths == [caught.value]


def test_a_rank_that_hangs_in_a_step_is_killed(make: Make) -> None:
    executor = make("hang in step", step_timeout=0.3)
    executor.start()
    deaths: list[RankDied] = []
    executor.watch(deaths.append)
    with pytest.raises(RankDied, match=r"did not finish step 0 within 0\.3 s") as caught:
        executor.execute(plan())
    executor._keeper._thread.join(PATIENCE_SECONDS)
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
    os.kill(executor._keeper.ranks[-1].process.pid, signal.SIGKILL)
    assert told.wait(PATIENCE_SECONDS)
    assert f"rank {world - 1}" in str(deaths[0])
    assert "SIGKILL" in str(deaths[0])
    late: list[RankDied] = []
    executor.watch(late.append)
    assert late == deaths


# -- several ranks ----------------------------------------------------------------------------------------------------
def step_of(executor: RankExecutor, **options: int) -> PddError:
    """What a first step ends with."""
    executor.start()
    with pytest.raises(PddError) as caught:
        executor.execute(plan(**options))
    return caught.value


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 0), (4, 2), (4, 3)])
@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [("fail in step", EngineError, "out of memory"), ("die in step", RankDied, "was killed by SIGKILL"),
     ("answer wrongly", EngineError, "answered step 0"), ("answer and die", RankDied, "was killed by SIGKILL"),
     ("answer twice", EngineError, "answered step 0")],
)
def test_the_first_failure_ends_a_step_that_the_others_never_would(
    make: Make, world: int, rank: int, behaviour: str, kind: type[PddError], words: str
) -> None:
    others = [f"hang in step@{other}" for other in range(world) if other != rank]
    executor = make(",".join([f"{behaviour}@{rank}", *others]), world=world, step_timeout=10 * PATIENCE_SECONDS)
    error = step_of(executor)
    for each in executor._keeper.ranks:
        each.process.kill()  # a close would wait for them
    assert type(error) is kind
    assert words in str(error)
    assert behaviour == "fail in step" or f"rank {rank}" in str(error)


@pytest.mark.parametrize("behaviour", ["fail in start E781", "die in start"])
def test_a_start_that_fails_on_one_rank_does_not_wait_for_the_others(make: Make, behaviour: str) -> None:
    executor = make(f"hang in start@0,{behaviour}@1", world=2, start_timeout=10 * PATIENCE_SECONDS)
    with pytest.raises(PddError, match=r"not a checkpoint|rank 1 .* exited with status 3"):
        executor.start()


@pytest.mark.parametrize(
    ("behaviour", "world", "who"),
    [("hang in step@2", 4, "rank 2"), ("hang in step@0", 2, "rank 0"), ("hang in step", 2, "ranks 0, 1"),
     ("hang in step@1,deaf@3", 4, "ranks 1, 3")],
)
def test_every_rank_that_is_late_is_named_and_killed(make: Make, behaviour: str, world: int, who: str) -> None:
    executor = make(behaviour, world=world, step_timeout=0.5)
    error = step_of(executor)
    assert str(error).startswith(f"{who} did not finish step 0 within 0.5 s")
    for rank in who.split(" ", 1)[1].split(", "):
        process = executor._keeper.ranks[int(rank)].process
        process.wait(PATIENCE_SECONDS)
        assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("behaviour", "world", "who"),
    [("wait in step@0,hang in step@1", 2, "rank 1 did not finish step 0 within 0.5 s and was killed; rank 0 waited for it"),
     ("wait in step@0,hang in step@1,wait in step@2,hang in step@3", 4,
      "ranks 1, 3 did not finish step 0 within 0.5 s and were killed; ranks 0, 2 waited for them")],
)
def test_of_ranks_that_are_late_those_that_the_others_wait_for_are_named(make: Make, behaviour: str, world: int, who: str) -> None:
    executor = make(behaviour, world=world, step_timeout=0.5)
    assert str(step_of(executor)).startswith(who)
    for rank in executor._keeper.ranks:
        rank.process.wait(PATIENCE_SECONDS)
        assert rank.process.returncode == -signal.SIGKILL


def test_ranks_that_wait_for_a_dead_one_are_not_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.engine.rank_keeper.SHUTDOWN_SECONDS", 10 * PATIENCE_SECONDS)
    executor = make("wait in step@0,die in step@1", world=2, step_timeout=10 * PATIENCE_SECONDS)
    assert "rank 1" in str(step_of(executor))
    executor.close()
    assert executor._keeper.ranks[0].process.returncode == -signal.SIGKILL


def test_the_pool_is_as_large_as_the_rank_with_least_room_says(make: Make) -> None:
    infos = make("has room for 3@1", world=4).start()
    assert [info.ready.num_pages for info in infos] == [3] * 4


def test_a_rank_that_does_not_read_is_late_too(make: Make) -> None:
    """The plan does not fit the socket: no send may wait for a rank longer than the step may take."""
    error = step_of(make("deaf@0", world=2, step_timeout=0.5), num_tokens=1_000_000)
    assert str(error).startswith("rank 0 did not finish step 0 within 0.5 s")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_plans_that_no_socket_holds_reach_every_rank(make: Make, world: int) -> None:
    executor = make(world=world)
    executor.start()
    for step in range(3):
        assert executor.execute(plan(step, num_tokens=1_000_000)).step == step


def test_a_silent_death_is_the_cause_of_what_others_say(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.engine.executor.CAUSE_SECONDS", PATIENCE_SECONDS)
    error = step_of(make("fail in step@0,die in step@1", world=2))
    assert isinstance(error, RankDied)
    assert "rank 1" in str(error)


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1)])
def test_a_death_is_heard_though_a_child_keeps_the_channel_open(make: Make, world: int, rank: int) -> None:
    error = step_of(make(f"die and leave a child@{rank}", world=world, step_timeout=10 * PATIENCE_SECONDS))
    assert isinstance(error, RankDied)
    assert f"rank {rank}" in str(error)
    assert "SIGKILL" in str(error)


def test_what_a_rank_says_at_its_end_is_heard_by_the_next_step(make: Make) -> None:
    executor = make("fail when told@1", world=2)
    executor.start()
    executor.execute(plan())
    os.kill(executor._keeper.ranks[1].process.pid, signal.SIGUSR1)
    assert executor._keeper.wait_for_death(PATIENCE_SECONDS)
    with pytest.raises(EngineError, match="fell off the bus"):
        executor.execute(plan(1))


@pytest.mark.parametrize(("world", "rank", "other"), [(2, 1, 0), (4, 0, 1), (4, 3, 0)])
@pytest.mark.parametrize(
    ("behaviour", "words"), [("disagree", "row 5 got tokens [8], not [7]"), ("lose a row", "it sampled rows [], not [5]")]
)
def test_a_rank_that_samples_other_tokens_is_named(
    make: Make, world: int, rank: int, other: int, behaviour: str, words: str
) -> None:
    error = step_of(make(f"{behaviour}@{rank}", world=world))
    assert isinstance(error, RanksDisagree)
    assert str(error) == f"rank {rank} disagrees with rank {other} in step 0: {words}"


def test_log_probabilities_may_differ_and_those_of_rank_0_count(make: Make) -> None:
    executor = make("other logprobs@1", world=2)
    executor.start()
    assert executor.execute(plan()).sampled[0].logprobs == (0.2,)


def test_ranks_that_loaded_different_models_do_not_start(make: Make) -> None:
    with pytest.raises(RanksDisagree, match="rank 2 disagrees with rank 0 after its start: its fingerprint is other, not f"):
        make("other model@2", world=4).start()


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
