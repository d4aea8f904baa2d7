"""Names of drafters, the drafter that never drafts, and vocabularies compared id by id."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.backend.toy import ToyBackend
from paceline.draft import (
    DEFAULT_DRAFT_LENGTH,
    AutoDrafter,
    ForcedDrafter,
    LookupDrafter,
    ModelDrafter,
    NoDrafter,
    check_same_vocabulary,
    open_drafter,
    parse_drafter,
)
from paceline.errors import InvalidParams, VocabularyMismatch
from paceline.types import Drafter

from .fakes import FakeTokenizer, context_of, proposed

ALLOWED = "allowed: auto, auto:NAME, none, lookup, model:NAME, forced, forced+lookup, forced+model:NAME"


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("none", ("none", "", False)),
        ("lookup", ("lookup", "", False)),
        ("auto", ("lookup", "", True)),
        ("forced", ("none", "", True)),
        ("forced+lookup", ("lookup", "", True)),
        ("model:smollm2:q4_0", ("model", "smollm2:q4_0", False)),
        ("forced+model:smollm2:q4_0", ("model", "smollm2:q4_0", True)),
        ("model:/data/a b.gguf", ("model", "/data/a b.gguf", False)),
        ("model:forced+lookup", ("model", "forced+lookup", False)),
    ],
)
def test_names(spec: str, expected: tuple[str, str, bool]) -> None:
    assert parse_drafter(spec) == expected


@pytest.mark.parametrize(
    "spec, hint",
    [
        ("lokup", "did you mean lookup?"),
        ("modle:smollm2", "did you mean model:NAME?"),
        ("non", "did you mean none?"),
        ("lookup:3", "lookup takes nothing behind a colon"),
        ("none:", "none takes nothing behind a colon"),
        ("model", "names no model; write model:NAME"),
        ("model:", "names no model; write model:NAME"),
        ("forced+model:", "names no model; write forced+model:NAME, as in forced+model:smollm2"),
        ("forced+lokup", "did you mean forced+lookup?"),
        ("forced:3", "forced takes nothing behind a colon"),
        ("forced+lookup:2", "forced+lookup takes nothing behind a colon"),
        ("forced+", "did you mean forced?"),
        ("ngram", "did you mean lookup?"),
        ("prompt_lookup", "did you mean lookup?"),
        ("Draft_Model:smollm2", "did you mean model:NAME?"),
        ("off", "did you mean none?"),
        ("grammar", "did you mean forced?"),
        ("lookup+forced", "did you mean forced+lookup? What is forced comes first"),
        ("lookup:3+forced", ALLOWED),
        ("forced+none", ALLOWED),
        ("forced+auto", ALLOWED),
        ("forced+forced+lookup", ALLOWED),
        ("eagle3", ALLOWED),
        ("", ALLOWED),
        ("LOOKUP", ALLOWED),
        (None, ALLOWED),
    ],
)
def test_unknown_names_say_what_exists(spec: Any, hint: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        parse_drafter(spec)
    assert f"drafter = {spec!r}" in str(caught.value)
    assert hint in str(caught.value)


def test_open_drafter_opens_a_model_only_for_model_names() -> None:
    target, opened = ToyBackend(), []

    def open_backend(name: str) -> ToyBackend:
        opened.append(name)
        return ToyBackend(vocab_size=257 if name == "same" else 30)

    assert isinstance(open_drafter("none", target, open_backend), NoDrafter)
    assert isinstance(open_drafter("lookup", target, open_backend), LookupDrafter)
    for spec, kind in (("auto", LookupDrafter), ("forced+lookup", LookupDrafter), ("forced", NoDrafter)):
        drafter = open_drafter(spec, target, open_backend)
        assert isinstance(drafter, ForcedDrafter)
        assert isinstance(drafter.inner, kind)
        assert drafter.name == ("forced+lookup" if spec == "auto" else spec)
    assert opened == []
    assert isinstance(open_drafter("model:same", target, open_backend), ModelDrafter)
    drafter = open_drafter("forced+model:same", target, open_backend)
    assert isinstance(drafter, AutoDrafter)
    forced, dear = drafter.stages
    assert isinstance(forced, ForcedDrafter)
    assert isinstance(forced.inner, NoDrafter)
    assert isinstance(dear, ForcedDrafter)
    assert isinstance(dear.inner, ModelDrafter)
    assert drafter.name == "forced+model:same"
    for spec in ("model:other", "forced+model:other"):
        with pytest.raises(VocabularyMismatch):
            open_drafter(spec, target, open_backend)
    assert opened == ["same", "same", "other", "other"]
    assert DEFAULT_DRAFT_LENGTH == 4


def test_no_drafter_proposes_nothing() -> None:
    drafter = NoDrafter()
    assert isinstance(drafter, Drafter)
    contexts = [context_of([1, 2, 1, 2], 0, start=(3,)), context_of([1], 1)]
    drafter.observe(0, [1, 2])
    answers = [proposed(answer) for answer in drafter.propose(contexts, [4, 0])]
    assert [(len(a), a.kind) for a in answers] == [(0, "point"), (0, "point")]
    assert all(context.draws.asked == [] for context in contexts)  # type: ignore[attr-defined]
    drafter.release(5)
    drafter.close()


# --- vocabularies -----------------------------------------------------------------------------------


def test_equal_vocabularies_pass() -> None:
    check_same_vocabulary(FakeTokenizer([b"a", b"", b"\xe2"]), FakeTokenizer([b"a", b"", b"\xe2"]))


def test_a_permuted_vocabulary_of_the_same_size_is_refused() -> None:
    """sgl-project/sglang#24051, ggml-org/llama.cpp PR #3812: garbage, and no error."""
    texts = [b"<s>", b"the", b" cat", b" sat"]
    permuted = [b"<s>", b"the", b" sat", b" cat"]
    with pytest.raises(VocabularyMismatch, match=r"token 2 is b' cat' for the target but b' sat' for the"):
        check_same_vocabulary(FakeTokenizer(texts), FakeTokenizer(permuted))


@pytest.mark.parametrize("target_size, draft_size", [(4, 6), (6, 4)])
def test_sizes_may_differ_where_the_shared_part_is_equal(target_size: int, draft_size: int) -> None:
    """SafeAILab/EAGLE#258: padding rows make sizes differ; a different token among the shared ones is refused."""
    texts = [b"%d" % i for i in range(6)]
    check_same_vocabulary(FakeTokenizer(texts[:target_size]), FakeTokenizer(texts[:draft_size]))
    other = [*texts[:3], b"x", *texts[4:]]
    with pytest.raises(VocabularyMismatch, match="token 3 is b'3' for the target but b'x' for the drafter"):
        check_same_vocabulary(FakeTokenizer(texts[:target_size]), FakeTokenizer(other[:draft_size]))


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(VocabularyMismatch, match="the target has 1 tokens and the drafter 0"):
        check_same_vocabulary(FakeTokenizer([b"a"]), FakeTokenizer([]))
