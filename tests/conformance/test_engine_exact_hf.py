"""The exact law of the whole engine with a transformers model in float64 in the loop, on pages of two tokens.

As test_engine_exact.py, with V = 2 and K = 2. The rows of the oracle are the model's own, by its own attention and
without a cache, one text at a time; the engine's come from packed forwards over pages that earlier branches have
published, rolled back and released.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paceline.backend.hf import HFBackend  # noqa: E402
from paceline.backend.toy import ToyTokenizer  # noqa: E402
from paceline.engine import Engine  # noqa: E402
from paceline.errors import BackendError  # noqa: E402
from paceline.params import SamplingParams  # noqa: E402
from paceline.rng import KeyedDraws  # noqa: E402
from paceline.types import Draws  # noqa: E402
from tests.verify.tables import Tables  # noqa: E402

from .engine_oracle import Row, Tokens, assert_same_law  # noqa: E402
from .engine_runs import OTHER, SUBJECT, Ask, EveryDraftOfCoupled, Scene, law, rejected_law  # noqa: E402
from .enumerator import Branches  # noqa: E402
from .test_engine_exact import MATES, WAYS  # noqa: E402

V, K, MAX_LEN = 2, 2, 32


@cache
def model(window: int | None = None) -> Any:
    """Two layers with logits of some spread; `window`: Mistral's sliding window, shorter than the texts."""
    torch.manual_seed(3)
    kind = transformers.MistralConfig if window else transformers.LlamaConfig
    config = kind(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        **({"sliding_window": window} if window else {}),
    )
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return built.eval()


@cache
def own_copy(window: int | None) -> Any:
    twin = copy.deepcopy(model(window))
    twin.set_attn_implementation("sdpa")
    return twin


@cache
def own_row(window: int | None, tokens: Tokens) -> Row:
    """float64[V] behind `tokens`: a copy of the model, its own attention, no cache."""
    with torch.inference_mode():
        return own_copy(window)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy()


@cache
def backend(window: int | None) -> HFBackend:
    options: dict[str, Any] = {"max_seqs": 4, "max_len": MAX_LEN, "kv_tokens": 64, "max_step_tokens": 64}
    return HFBackend(model(window), tokenizer=ToyTokenizer(V, frozenset()), page_size=2, **options)


LAST: dict[int | None, Engine] = {}
"""The engine of the last run on each backend."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScene(Scene):
    """A scene on the one backend of its model; whoever the last run left behind is put out first."""

    window: int | None = None

    def engine(self, branches: Branches) -> Engine:
        before = LAST.pop(self.window, None)
        if before is not None:
            before.fail(BackendError("the run is over"))

        def make_draws(seed: int, step_start: int) -> Draws:
            return branches(seed, step_start) if seed in (SUBJECT, OTHER) else KeyedDraws(seed, step_start)

        target: Any = backend(self.window)
        drafter = EveryDraftOfCoupled(self.drafter(self, target), branches)
        LAST[self.window] = engine = Engine(target, drafter, make_draws=make_draws)
        return engine


def scene(way: str, *asks: Ask, window: int | None = None) -> ModelScene:
    q = Tables("random", V, seed=2).q
    return ModelScene(
        logits=lambda tokens: own_row(window, tokens), q=q, drafter=WAYS[way][1], asks=asks, window=window
    )


def subject(way: str, **params: Any) -> Ask:
    options = {"max_tokens": K + 2, "draft_length": K, "verification": WAYS[way][0], **params}
    return Ask((0, 1, 1, 0, 1), SamplingParams(seed=SUBJECT, **options))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(s: ModelScene, ask: Ask) -> None:
    assert_same_law(law(s), s.plain(ask))
    backend(s.window).check()


@pytest.mark.parametrize("window", [None, 4], ids=["full", "window"])
@pytest.mark.parametrize("way", ["rejection", "block", "coupled", "point", "model, block", "lookup", "none"])
def test_a_real_model_in_the_loop(way: str, window: int | None) -> None:
    ask = subject(way, max_tokens=K + 1 if "coupled" in way else K + 2)
    check(scene(way, ask, window=window), ask)


@pytest.mark.parametrize("way", ["rejection", "block"])
def test_in_company_and_with_transforms(way: str) -> None:
    ask = subject(way, temperature=0.8, frequency_penalty=0.5, top_p=0.95)
    check(scene(way, *MATES, ask), ask)


def test_the_law_is_not_a_point() -> None:
    """The model is unsure and drafts are really rejected, so that the tests above have something to see."""
    ask = subject("block")
    s = scene("block", ask)
    weights = np.array(sorted(s.plain(ask).values()))
    assert len(weights) == 2 ** (K + 2)
    assert weights[-1] < 0.8
    assert len(rejected_law(s)) > 1
