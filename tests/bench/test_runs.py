"""Everybody in turn, asked the same; and a real model's answers counted alike."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from paceline.backend.toy import ToyBackend
from paceline.bench.guard import Guard
from paceline.bench.prompts import Question
from paceline.bench.runs import Ask, RefusedError, Run, Workload, measure, tokenised, units
from paceline.bench.target import Own, Setting, Target, open_target, settings
from paceline.draft import LookupDrafter
from paceline.errors import InvalidInput, InvalidParams, UnsupportedOption
from paceline.params import SamplingParams

from .fakes import FakeContender, loaded, prompts, run

Log = list[tuple[str, tuple[Ask, ...], int]]
OFF = Guard(on=False)


def workload(**options: object) -> Workload:
    return Workload(questions=(), params=SamplingParams(max_tokens=20), **options)  # type: ignore[arg-type]


def silent(what: str, done: int, total: int) -> None:
    pass


def test_all_contenders_are_asked_the_same_in_turn() -> None:
    """Catches contenders with other seeds, other params, or all their runs in one block."""
    log: Log = []
    contenders = [FakeContender(name, log) for name in ("plain", "K = 4", "adaptive")]
    work = workload(temperatures=(0.0, 1.0), repeats=2)
    runs = measure(contenders, work, prompts(a=2, b=1), OFF, silent).made
    assert Counter(r.contender for r in runs) == {"plain": 12, "K = 4": 12, "adaptive": 12}
    turns = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert len(turns) == 2 * (1 + 6)  # of each temperature one warms up
    for turn in turns:
        assert sorted(name for name, _, _ in turn) == ["K = 4", "adaptive", "plain"]
        assert len({asks for _, asks, _ in turn}) == 1
    assert len({turn[0][0] for turn in turns}) == 3  # who goes first changes
    seeds = [asks[0].params.seed for name, asks, _ in log if name == "plain" and asks[0].params.max_tokens == 20]
    assert len(set(seeds)) == 6  # of each prompt and repeat its own, the same at both temperatures


def test_what_warms_up_does_not_count() -> None:
    """Catches compile times and cold caches in the first number."""
    log: Log = []
    work = Workload(questions=(), params=SamplingParams(max_tokens=100))
    runs = measure([FakeContender("plain", log)], work, prompts(a=1), OFF, silent).made
    assert [asks[0].params.max_tokens for _, asks, _ in log] == [16, 100]
    assert len(runs) == 1


def test_progress_reaches_its_end() -> None:
    """Catches a bar that stops short or runs over."""
    seen: list[tuple[int, int]] = []
    log: Log = []
    measure(
        [FakeContender("x", log), FakeContender("y", log)],
        workload(concurrencies=(1, 2), repeats=3),
        prompts(a=3),
        OFF,
        lambda what, done, total: seen.append((done, total)),
    )
    total = 2 * (1 + 3 * 3) + 2 * (1 + 3 * 2)
    assert seen == [(i, total) for i in range(total + 1)]


def test_a_unit_has_as_many_as_run_at_once() -> None:
    """Catches units of mixed categories, and a last unit that is not full, where fewer run at once than it says."""
    got = [(category, [q.question_id for q, _ in pairs]) for category, pairs in units(prompts(a=3, b=1), 2)]
    assert got == [("a", ["a0", "a1"]), ("a", ["a2", "a0"]), ("b", ["b0", "b0"])]
    log: Log = []
    measure([FakeContender("x", log)], workload(concurrencies=(4,), unit_size=6), prompts(a=3), OFF, silent)
    assert [len(asks) for _, asks, _ in log] == [6, 6]
    assert {concurrency for _, _, concurrency in log} == {4}
    assert len({ask.params.seed for ask in log[-1][1]}) == 6  # a prompt that comes twice draws anew


def test_a_peer_that_fails_leaves_the_others_going() -> None:
    """Catches an hour of measurements lost, and a peer that is asked again when it is gone."""
    log: Log = []
    contenders = [FakeContender("plain", log), FakeContender("peer", log, fails_at=3)]
    runs = measure(contenders, workload(), prompts(a=4), OFF, silent).made
    assert Counter(r.contender for r in runs) == {"plain": 4, "peer": 2}
    assert [r.error for r in runs if r.contender == "peer"] == [None, "peer peer fell over"]
    cold = measure([FakeContender("peer", [], fails_at=1)], workload(), prompts(a=2), OFF, silent).made
    assert [(r.error, r.results) for r in cold] == [("peer peer fell over", ())]


def test_a_peer_that_refuses_is_asked_again_where_something_else_is_asked() -> None:
    """Catches a refusal of one temperature that ends a peer for good, and one that is asked for again and again."""
    log: Log = []
    refuses = FakeContender("peer", log, fails_at=1, error=RefusedError("greedy only"))
    work = workload(temperatures=(1.0, 0.0), repeats=2)
    runs = measure([FakeContender("plain", log), refuses], work, prompts(a=3), OFF, silent).made
    mine = [(r.temperature, r.error) for r in runs if r.contender == "peer"]
    assert mine == [(1.0, "greedy only"), *[(0.0, None)] * 6]
    assert Counter(r.contender for r in runs) == {"plain": 12, "peer": 7}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("decode failed")])
def test_what_came_before_an_error_is_kept(error: BaseException) -> None:
    """Catches runs that are lost, warm-ups that are counted, and an error that is swallowed."""
    log: Log = []
    contenders = [FakeContender("plain", log), FakeContender("breaks", log, fails_at=4, error=error)]
    found = measure(contenders, workload(), prompts(a=5), OFF, silent)
    made = [(r.contender, r.unit) for r in found.made]
    assert made == [("plain", 0), ("breaks", 0), ("breaks", 1), ("plain", 1), ("plain", 2)]
    assert (found.planned, found.error) == (10, error)
    assert "after 5 of 10 runs" in (found.stopped or "")
    with pytest.raises(type(error)):
        measure([FakeContender("x", log, fails_at=2, error=error)], workload(), prompts(a=5), OFF, silent)
    assert measure(contenders[:1], workload(), prompts(a=1), OFF, silent).stopped is None


def test_runs_survive_json() -> None:
    """Catches a report that cannot be shown again."""
    for one in (run("x", 2.0, load=loaded()), run("x", 0.0, results=(), error="gone")):
        assert Run.from_json(json.loads(json.dumps(one.as_json()))) == one
    with pytest.raises(InvalidInput, match="other fields"):
        Run.from_json({"contender": "x"})


def test_prompts_that_do_not_fit_are_left_out_and_counted() -> None:
    """Catches prompts that are dropped in silence, or counted against the limit."""
    tokenizer = ToyBackend().tokenizer
    questions = [Question(str(i), "a", "x" * n) for i, n in enumerate((5, 90, 6, 7))]
    work = Workload(questions=questions, params=SamplingParams(max_tokens=20), chat=False, limit=2)
    found = tokenised(work, tokenizer, 100)
    assert [q.question_id for q, _ in found.groups["a"]] == ["0", "2"]
    assert found.left_out == {"a": 1}
    assert not found.template
    in_template = Workload(questions=questions[:1], params=SamplingParams(max_tokens=20))
    assert len(tokenised(in_template, tokenizer, 100).groups["a"][0][1]) == len("user: xxxxx\nassistant: ")
    with pytest.raises(InvalidInput, match="no prompt fits: allowed are 2 tokens"):
        tokenised(work, tokenizer, 22)


# --- our own contenders -----------------------------------------------------------------------------------


def ask(text: str = "hello hello hello", **options: object) -> Ask:
    params = SamplingParams(**{"max_tokens": 30, "temperature": 1.0, "seed": 3, **options})  # type: ignore[arg-type]
    return Ask(Question("q", "a", text), tuple(ToyBackend().tokenizer.encode(text)), params)


def test_settings_are_named_by_what_differs() -> None:
    """Catches two contenders of one name, and a plain one that has a drafter to keep up to date."""
    assert settings(["auto"], [])[0] == Setting("plain", "none", 0)
    assert [s.name for s in settings(["auto"], [2, 4])] == ["plain", "K = 2", "K = 4", "adaptive"]
    both = settings(["lookup", "model:toy"], [4], plain=False)
    assert [s.name for s in both] == ["lookup K = 4", "lookup adaptive", "model:toy K = 4", "model:toy adaptive"]


def test_all_settings_emit_the_same_tokens_and_only_some_draft() -> None:
    """Catches a plain contender that drafts, a fixed length that is not, and tokens counted differently."""
    with open_target("toy", {"model:toy": "model:toy"}, max_seqs=2) as target:
        found = {}
        for setting in settings(["model:toy"], [2, 5]):
            seconds, results = Own(target, setting).run([ask(), ask(seed=4)], 2)
            assert seconds > 0
            found[setting.name] = results
    texts = {name: [r.text for r in results] for name, results in found.items()}
    assert texts["plain"] == texts["K = 2"] == texts["K = 5"] == texts["adaptive"]
    stats = {name: results[0].speculation for name, results in found.items()}
    assert all(s is not None for s in stats.values())
    assert stats["plain"].drafted == 0  # type: ignore[union-attr]
    assert stats["plain"].tokens_per_step == 1.0  # type: ignore[union-attr]
    assert len(stats["K = 2"].drafted_at) == 2  # type: ignore[union-attr]
    assert len(stats["K = 5"].drafted_at) == 5  # type: ignore[union-attr]


def test_the_id_that_ends_an_answer_is_not_counted() -> None:
    """Catches one token more for us than for engines that do not hand the end id out."""
    with open_target("toy", {}, max_seqs=1) as target:
        plain = Own(target, Setting("plain", "none", 0))
        whole = plain.run([ask()], 1)[1][0]
        with_end = ask(stop_token_ids=[ToyBackend().tokenizer.encode(whole.text)[10]])
        cut = plain.run([with_end], 1)[1][0]
    assert (whole.tokens, whole.finish_reason) == (30, "length")
    assert cut.finish_reason == "stop"
    assert cut.speculation is not None
    assert cut.tokens == cut.speculation.emitted - 1 == len(cut.text) <= 10


def test_one_llm_serves_a_setting_for_good() -> None:
    """Catches what the engine has learnt being thrown away between prompts."""
    backend = ToyBackend(max_seqs=4)
    target = Target(backend, {"lookup": LookupDrafter()})
    assert target.llm("lookup", 1) is target.llm("lookup", 1)
    assert target.llm("lookup", 4) is not target.llm("lookup", 1)
    assert target.llm("lookup", 1, "K = 4") is not target.llm("lookup", 1, "adaptive"), "one learns from the other"
    with pytest.raises(InvalidParams, match="9 requests at once; allowed: at most 4"):
        target.llm("none", 9)
    target.close()


def test_a_model_that_cannot_speculate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a comparison of plain decoding with itself under other names."""
    import paceline.bench.target as module

    stuck = ToyBackend(can_truncate=False)
    monkeypatch.setattr(module, "open_backend", lambda *a, **k: stuck)
    with (
        pytest.raises(UnsupportedOption, match="speculation is off for toy: this toy was built without rollback"),
        open_target("toy", {"auto": "auto"}),
    ):
        pass
