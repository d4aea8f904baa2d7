"""The shipped engine under the enumerator: the exact law of what one request, or two, come out with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from paceline.backend.toy import ToyBackend
from paceline.draft import AutoDrafter, LookupDrafter, ModelDrafter, NoDrafter
from paceline.engine import Engine
from paceline.errors import NoLegalToken, PacelineError
from paceline.params import SamplingParams
from paceline.rng import KeyedDraws
from paceline.types import DraftContext, Drafter, Draws, Proposal, RequestOutput, Role
from tests.drafters import PointDrafter, TableDrafter

from .engine_oracle import Outcome, Row, Tokens, plain_request
from .enumerator import BranchDraws, Branches, EveryDraft, Law, enumerate_outcomes
from .options_reference import Places, Plain, row_places

Table = Callable[[Tokens], Row]
DrafterFactory = Callable[["Scene", ToyBackend], Drafter]
SUBJECT, OTHER = 1, 2
"""Seeds whose draws are enumerated. Whoever has another seed has the shipped keyed draws."""


# --- scenes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ask:
    """One request. arrives, cancelled: the step before which it is added, and given up."""

    prompt: Tokens
    params: SamplingParams
    arrives: int = 0
    cancelled: int | None = None

    @property
    def enumerated(self) -> bool:
        return self.params.seed in (SUBJECT, OTHER)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """A target, a drafter made from q, and the requests, in order of arrival. backend: options of the toy."""

    logits: Table
    q: Table
    asks: tuple[Ask, ...]
    drafter: DrafterFactory
    end_ids: Tokens = ()
    max_len: int = 32
    backend: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return len(self.q(()))

    @cached_property
    def draft_logits(self) -> Table:
        """What a draft model returns whose q, without transforms, is the scene's."""
        return logits_of(self.q)

    def engine(self, branches: Branches) -> Engine:
        """A fresh engine whose enumerated requests draw from `branches`."""
        options = {"max_seqs": 4, "max_len": self.max_len, "stop_ids": self.end_ids, "page_size": 2, **self.backend}
        target = ToyBackend(self.vocab_size, table=self.logits, **options)

        def make_draws(seed: int, step_start: int) -> Draws:
            return branches(seed, step_start) if seed in (SUBJECT, OTHER) else KeyedDraws(seed, step_start)

        drafter = self.drafter(self, target)
        if isinstance(drafter, AutoDrafter):  # the engine takes it apart, so its parts are wrapped
            cheap, dear = (EveryDraftOfCoupled(stage, branches) for stage in drafter.stages)
            return Engine(target, AutoDrafter(cheap, dear, drafter.name), make_draws=make_draws)
        return Engine(target, EveryDraftOfCoupled(drafter, branches), make_draws=make_draws)

    def plain(self, ask: Ask) -> Law:
        """The law of one request's outcome under plain sampling."""
        return self.by_definition(ask).law()

    def by_definition(self, ask: Ask) -> Plain:
        """One request on its own."""
        return plain_request(self.logits, ask.prompt, ask.params, self.max_len, self.end_ids)


def logits_of(table: Table) -> Table:
    """Logits of the table's rows, -inf for what cannot be, of both signs (the repetition penalty tells them apart)."""
    rows: dict[Tokens, Row] = {}

    def logits(tokens: Tokens) -> Row:
        if tokens not in rows:
            with np.errstate(divide="ignore"):
                rows[tokens] = np.log(table(tokens)) + 1.0
        return rows[tokens]

    return logits


class EveryDraftOfCoupled(EveryDraft):
    """EveryDraft for the enumerated requests that are verified coupled; everybody else drafts as ever."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Proposal | PacelineError]:
        def seen(c: DraftContext) -> DraftContext:
            if isinstance(c.draws, BranchDraws) and c.role is Role.TARGET:
                return dataclasses.replace(c, draws=self._branches.every_draft(c.request_id, len(c.tokens)))
            return c

        return self._inner.propose([seen(c) for c in contexts], budgets)


# --- drafters, made from a scene's q ----------------------------------------------------------------


def sampling(scene: Scene, target: ToyBackend) -> Drafter:
    """Samples from q, which looks at the text and at the drafts before."""
    return TableDrafter(scene.q)


def sampling_twice(scene: Scene, target: ToyBackend) -> Drafter:
    """Samples from q in the first two steps, then drafts nothing."""
    drafter = TableDrafter(scene.q)
    drafter.more = lambda tokens, drafts: drafter.calls <= 2
    return drafter


def until_unsure(scene: Scene, target: ToyBackend) -> Drafter:
    """Stops *after* a token that q did not favour, so that the length depends on what was drawn; skips the steps
    that stand behind a token 1."""

    def more(tokens: Tokens, drafts: Tokens) -> bool:
        if not drafts:
            return tokens[-1] != 1
        return bool(scene.q((*tokens, *drafts[:-1]))[drafts[-1]] >= 0.5)

    return TableDrafter(scene.q, more=more)


def model(scene: Scene, target: ToyBackend) -> Drafter:
    """A second model whose logits are log q; its drafts go through the request's own transforms."""
    options = {"max_seqs": 4, "max_len": scene.max_len, "stop_ids": scene.end_ids}
    return ModelDrafter(ToyBackend(scene.vocab_size, table=scene.draft_logits, **options), "model", target)


def point(scene: Scene, target: ToyBackend) -> Drafter:
    """The likeliest tokens under q, without a q to answer for."""

    def guess(tokens: Tokens, budget: int) -> Tokens:
        drafts: Tokens = ()
        while len(drafts) < budget:
            drafts = (*drafts, int(np.argmax(scene.q((*tokens, *drafts)))))
        return drafts

    return PointDrafter(guess)


def point_until_unsure(scene: Scene, target: ToyBackend) -> Drafter:
    """Only as many likeliest tokens as q is sure of, possibly none."""

    def guess(tokens: Tokens, budget: int) -> Tokens:
        drafts: Tokens = ()
        while len(drafts) < budget and np.max(row := scene.q((*tokens, *drafts))) >= 0.6:
            drafts = (*drafts, int(np.argmax(row)))
        return drafts

    return PointDrafter(guess)


def lookup(scene: Scene, target: ToyBackend) -> Drafter:
    """The shipped prompt lookup."""
    return LookupDrafter(max_ngram=2, min_ngram=1)


def none(scene: Scene, target: ToyBackend) -> Drafter:
    """No drafts: plain decoding in the same loop."""
    return NoDrafter()


# --- laws -------------------------------------------------------------------------------------------


def joint_law(scene: Scene) -> Law:
    """Exact joint law of the outcomes of the enumerated requests, in order of arrival.

    In every single run also: companions get the tokens that they get alone, the books balance, and coupled
    requests emit the very tokens that the target's noise picks.
    """
    alone = {ask: stream(scene, ask) for ask in scene.asks if not ask.enumerated}
    plain = {ask: scene.by_definition(ask) for ask in scene.asks if ask.enumerated}

    def run(branches: Branches) -> tuple[Outcome, ...]:
        engine = scene.engine(branches)
        outputs, ids = play(scene, engine)
        for ask, tokens in alone.items():
            mine = tokens_so_far(engine, outputs, ids.get(ask))
            assert mine == tokens[: len(mine)], f"the companion with prompt {ask.prompt} got {mine}, alone {tokens}"
        return tuple(checked_outcome(outputs[ids[a]], a, branches, plain[a]) for a in scene.asks if a.enumerated)

    return enumerate_outcomes(run)


def law(scene: Scene) -> Law:
    """The law of the only enumerated request's outcome."""
    return {outcome: weight for (outcome,), weight in joint_law(scene).items()}


def rejected_law(scene: Scene) -> Law:
    """The law of how many drafts of the only enumerated request were rejected."""

    def run(branches: Branches) -> int:
        outputs, ids = play(scene, scene.engine(branches))
        return next(outputs[ids[a]].speculation.rejected for a in scene.asks if a.enumerated)

    return enumerate_outcomes(run)


def two_steps_law(scene: Scene) -> Law:
    """The law of the tokens that the only enumerated request has after two steps; its prompt is one token."""

    def run(branches: Branches) -> Tokens:
        engine = scene.engine(branches)
        outputs, ids = play(scene, engine, steps=2)
        return next(tokens_so_far(engine, outputs, ids[a]) for a in scene.asks if a.enumerated)

    return enumerate_outcomes(run)


def play(scene: Scene, engine: Engine, steps: int = 1000) -> tuple[dict[int, RequestOutput], dict[Ask, int]]:
    """At most `steps` steps, until the enumerated requests have finished: (outputs by id, id of each arrival)."""
    outputs: dict[int, RequestOutput] = {}
    ids: dict[Ask, int] = {}
    for step in range(steps):
        for ask in scene.asks:
            if ask.arrives == step:
                ids[ask] = engine.add(ask.prompt, ask.params)
            if ask.cancelled == step:
                engine.cancel(ids[ask])
        outputs.update((c.request_id, c.output) for c in engine.step() if c.output is not None)
        engine.backend.check()
        if all(ids.get(a) in outputs for a in scene.asks if a.enumerated):
            break
    return outputs, ids


def checked_outcome(output: RequestOutput, ask: Ask, branches: Branches, plain: Plain) -> Outcome:
    """The outcome of one request; its error where it had another one than that nothing may follow."""
    completion = output.outputs[0]
    if completion.verification == "coupled":
        picked, start = branches.target_draws(completion.seed), len(ask.prompt)
        assert all(picked[start + i] == token for i, token in enumerate(completion.token_ids))
    if completion.error is not None and not isinstance(completion.error, NoLegalToken):
        raise completion.error
    check_logprobs(output, 0, plain)
    reason = type(completion.error).__name__ if completion.error is not None else completion.stop_reason
    return completion.token_ids, completion.text, completion.finish_reason, reason


def check_logprobs(output: RequestOutput, index: int, plain: Plain) -> None:
    """What is told of the tokens of a sample and of the prompt is what `plain` says; nothing where nobody asked."""
    told, tokens, params = output.outputs[index].logprobs, output.outputs[index].token_ids, plain.params
    assert (told is None) == (params.logprobs is None), told
    assert told is None or len(told) == len(tokens), f"{len(told)} logprobs for {len(tokens)} tokens"
    for i, row in enumerate(told or ()):
        wanted = plain.places(tokens[:i], tokens[i], plain.p(tokens[:i]))
        assert same_places(row, wanted), f"behind {tokens[:i]} the logprobs are {row}, plainly {wanted}"
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None, output.prompt_logprobs
        return
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(plain.prompt)
    for i, row in enumerate(output.prompt_logprobs[1:], 1):
        wanted = row_places(plain.logits(plain.prompt[:i]), plain.prompt[i], params.prompt_logprobs)
        assert row is not None
        assert same_places(row, wanted), f"prompt token {i} has the logprobs {row}, plainly {wanted}"


def same_places(got: Any, wanted: Places) -> bool:
    """Whether logprobs of the engine are those of the reference, in the same order, up to rounding."""
    return [(t, one.rank) for t, one in got.items()] == [(t, rank) for t, (_, rank) in wanted.items()] and all(
        one.logprob == logprob or abs(one.logprob - logprob) <= 1e-9
        for one, (logprob, _) in zip(got.values(), wanted.values(), strict=True)
    )


def tokens_so_far(engine: Engine, outputs: dict[int, RequestOutput], request_id: int | None) -> Tokens:
    """What a request has by now: finished, running, or nothing yet."""
    if request_id in outputs:
        return outputs[request_id].outputs[0].token_ids
    running = (s for s in engine.running if s.request.request_id == request_id)
    return next((tuple(s.tokens[len(s.request.prompt_ids) :]) for s in running), ())


def stream(scene: Scene, ask: Ask) -> Tokens:
    """What a keyed request gets when nobody else is there."""
    engine = scene.engine(Branches())
    engine.add(ask.prompt, ask.params)
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    return chunks[-1].output.outputs[0].token_ids
