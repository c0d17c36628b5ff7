"""The history of a node: the latest changes of all parts, and the story of each request, in bounded memory."""

from __future__ import annotations

import threading

from pdd.history import History
from pdd.states import Change, Facts


def change(kind: str, ident: str, after: str, at: float = 0.0, why: str = "") -> Change:
    return Change(at, kind, ident, "", after, why)


def test_the_latest_changes_are_kept_in_bounded_memory() -> None:
    history = History(3)
    for n in range(9):
        history(Change(n, "link", "x" * 5000, "up", "closing", "y" * 5000, Facts(peer="z" * 5000, step=n)))
    assert [change.at for change in history.latest(99)] == [6, 7, 8]
    assert [change.facts.step for change in history.latest(2)] == [7, 8]
    change = history.latest(1)[0]
    assert max(len(change.ident), len(change.why), len(change.facts.peer)) == 256
    assert history.links() == history.latest(99)


def test_a_story_has_all_parts_of_a_request_and_no_other() -> None:
    history = History(2)
    history(change("request", "a/b", "waiting", 1))
    history(change("request", "c", "waiting", 2))
    history(change("attempt", "a/b/7", "choosing", 3))
    history(change("link", "a/b", "up", 4))
    history(change("job", "pf1-c", "queued", 5))
    history(change("attempt", "a/b/8", "choosing", 6))
    assert [(each.kind, each.at) for each in history.story("a/b")] == [("request", 1), ("attempt", 3), ("attempt", 6)]
    assert [each.at for each in history.story("pf1-c")] == [5]
    assert history.story("b") == []


def test_stories_that_have_ended_go_first_the_oldest_before_all() -> None:
    history = History(10, most_stories=20)
    for number in range(10):
        history(change("request", f"hung{number}", "waiting"))
    for number in range(100):
        history(change("request", f"r{number}", "waiting"))
        history(change("request", f"r{number}", "finished"))
    assert all(history.story(f"hung{number}") for number in range(10))
    assert history.story("r89") == []
    assert [each.after for each in history.story("r90")] == ["waiting", "finished"]
    history(change("attempt", "r95/3", "done", why="fenced after the end"))
    assert [each.kind for each in history.story("r95")] == ["request", "request", "attempt"]


def test_live_stories_are_bounded_too() -> None:
    history = History(10, most_stories=20)
    for number in range(100):
        history(change("request", f"r{number}", "waiting"))
    assert history.story("r79") == []
    assert history.story("r80")


def test_a_story_that_was_forgotten_does_not_live_for_ever_when_its_request_goes_on() -> None:
    history = History(10, most_stories=20)
    for n in range(40):
        history(Change(n, "request", f"late{n}", "running", "failed", ""))
    history(change("request", "new", "waiting", 50))
    for n in range(40):
        history(Change(n, "request", f"later{n}", "running", "failed", ""))
    assert history.story("new")


def test_a_long_story_keeps_its_beginning_and_its_end_and_its_bytes_are_counted() -> None:
    history = History(10, most_bytes=1 << 20)
    for step in range(1000):
        history(change("request", "r", "running", step, "x" * 200))
    ats = [each.at for each in history.story("r")]
    assert ats[:3] == [0, 1, 2]
    assert ats[-1] == 999
    assert len(ats) == 128
    once = history.num_bytes
    for step in range(1000):
        history(change("request", "r", "running", step, "x" * 200))
    assert history.num_bytes == once


def test_bytes_bound_the_number_of_stories() -> None:
    history = History(10, most_stories=10_000, most_bytes=100_000)
    for number in range(1000):
        history(change("request", f"r{number}", "waiting", why="y" * 200))
        assert history.num_bytes <= 100_000
    assert history.story("r999")
    assert history.story("r0") == []


def test_any_thread_may_record() -> None:
    history = History(100_000, most_stories=64)

    def record(name: str) -> None:
        for number in range(300):
            history(change("request", f"{name}{number}", "waiting"))
            history(change("request", f"{name}{number}", "finished"))

    threads = [threading.Thread(target=record, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(history.latest(100_000)) == 4 * 300 * 2
    kept = [name for name in "abcd" for number in range(300) if history.story(f"{name}{number}")]
    assert len(kept) == 64
