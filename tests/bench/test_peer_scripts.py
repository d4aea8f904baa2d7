"""The scripts in benchmarks/peers: transformers on a tiny model, vLLM's on a stand-in for the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.peers import Opening, Peer
from paceline.bench.prompts import Question
from paceline.bench.runs import Ask, PeerError, Result
from paceline.params import SamplingParams

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "peers"
VOCABULARY = 300
PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)


def opened(folder: Path, script: str, *words: str, stop: tuple[int, ...] = (), seqs: int = 2) -> Peer:
    command = [sys.executable, str(SCRIPTS / script), *words]
    return Peer("it", command, Opening(str(folder), 128, seqs, 1, stop), seconds=120.0)


def ask(ids: tuple[int, ...] = PROMPT, **options: Any) -> Ask:
    return Ask(Question("q", "a", "text"), ids, SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **options}))


def ids_of(result: Result) -> list[int]:
    """The tiny tokenizer's words are w0, w1, ..."""
    return [int(word[1:]) for word in result.text.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose generation_config would change every answer, were it used."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    place = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, **shape
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, top_k=1, repetition_penalty=3.0, eos_token_id=list(range(VOCABULARY)), pad_token_id=0
    )
    model.save_pretrained(place)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    plain = tokenizers.Tokenizer(words)
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[int]:
    """What the model says, one forward of the whole text after another."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def plain(folder: Path, greedy: list[int]) -> Iterator[Peer]:
    stop = next(token for i, token in enumerate(greedy) if i > 2 and token not in greedy[:i])
    with opened(folder, "transformers_peer.py", "--dtype", "float32", stop=(stop,)) as peer:
        yield peer


def test_transformers_answers_as_the_model_does(plain: Peer, greedy: list[int]) -> None:
    """Catches the model's own generation_config in the answer, another end than the one asked for, and the ending
    token counted."""
    seconds, (stopped, whole) = plain.run([ask(), ask(ignore_eos=True)], 1)
    stop = plain._stop_ids[0]
    assert seconds > 0
    assert ids_of(whole) == greedy
    assert (whole.tokens, whole.finish_reason) == (12, "length")
    assert ids_of(stopped) == greedy[: greedy.index(stop)]
    assert (stopped.tokens, stopped.finish_reason) == (greedy.index(stop), "stop")
    assert whole.decode_seconds is not None
    assert whole.decode_seconds > 0
    assert whole.speculation is not None
    assert (whole.speculation.steps, whole.speculation.drafted) == (12, 0)


def test_transformers_samples_from_the_whole_vocabulary(plain: Peer) -> None:
    """Catches top_k=50, which generate() puts where nothing is said, and one seed for all."""
    asks = [ask(temperature=50.0, max_tokens=1, ignore_eos=True, seed=seed) for seed in range(100)]
    _, results = plain.run(asks, 1)
    first = [ids_of(result)[0] for result in results]
    assert len(set(first)) > 60
    _, again = plain.run(asks, 1)
    assert [ids_of(result)[0] for result in again] == first
    _, few = plain.run([ask(temperature=50.0, max_tokens=1, ignore_eos=True, seed=s, top_k=3) for s in range(40)], 1)
    assert len({ids_of(result)[0] for result in few}) == 3


def test_transformers_lookup_drafts_and_changes_nothing(folder: Path, greedy: list[int]) -> None:
    """Catches a lookup mode that does not draft, counts that do not add up, and penalties that are ignored."""
    lookup = ("--mode", "lookup", "--drafts", "3", "--dtype", "float32")
    text = (*PROMPT, *greedy, *PROMPT)  # what comes next may have been said before
    with opened(folder, "transformers_peer.py", *lookup) as peer:
        _, (result, other) = peer.run([ask(ignore_eos=True), ask(text, ignore_eos=True)], 1)
        facts = peer.describe()
        with pytest.raises(PeerError, match=r"presence_penalty=1.0: .*no such option"):
            peer.run([ask(presence_penalty=1.0)], 1)
        with pytest.raises(PeerError, match=r"concurrency=2: .*one request is answered after another"):
            peer.run([ask(), ask()], 2)
    assert facts["prompt_lookup_num_tokens"] == 3
    assert ids_of(result) == greedy
    for stats in (result.speculation, other.speculation):
        assert stats is not None
        assert 0 < stats.drafted <= 3 * stats.steps
        assert stats.steps + stats.accepted == 12


@pytest.mark.slow
def test_transformers_compiles_before_it_is_ready(folder: Path, greedy: list[int]) -> None:
    """Catches compiling that changes the answers, or the counts of steps and drafts."""
    lookup = ("--mode", "lookup", "--drafts", "3", "--dtype", "float32", "--compile")
    with opened(folder, "transformers_peer.py", *lookup) as peer:
        _, (result,) = peer.run([ask(ignore_eos=True)], 1)
        assert peer.describe()["compiled"] is True
    assert ids_of(result) == greedy
    assert result.speculation is not None
    assert result.speculation.steps + result.speculation.accepted == 12


def test_transformers_batches_and_answers_each_its_own(folder: Path, greedy: list[int]) -> None:
    """Catches answers that get mixed up between requests, more of them at once than asked, and options that its
    continuous batching drops without an error."""
    other = tuple(reversed(PROMPT))
    batch = ("--mode", "batch", "--dtype", "float32")
    with opened(folder, "transformers_peer.py", *batch) as peer:
        facts = peer.describe()
        _, results = peer.run(
            [ask(ignore_eos=True), ask(other, ignore_eos=True), ask(ignore_eos=True, max_tokens=5)], 2
        )
        _, (alone,) = peer.run([ask(other, ignore_eos=True)], 1)
        _, (sampled,) = peer.run([ask(temperature=1.0, seed=2, ignore_eos=True)], 1)
        with pytest.raises(PeerError, match=r"repetition_penalty=1.5: .*drops it"):
            peer.run([ask(repetition_penalty=1.5)], 1)
    assert (facts["max_batch_tokens"], facts["num_blocks"]) == ("its own", 3)
    assert ids_of(results[0]) == greedy
    assert ids_of(results[1]) == ids_of(alone) != greedy
    assert ids_of(results[2]) == greedy[:5]
    assert sampled.tokens == 12
    assert results[0].decode_seconds is not None


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Catches a traceback where the caller needs to know what may stand there."""
    with pytest.raises(PeerError, match=r"missing.gguf'; allowed: a folder in Hugging Face's format, or a .gguf file"):
        opened(tmp_path / "missing.gguf", "transformers_peer.py")


STAND_IN = '''
"""In every step each request gets the next two numbers behind its prompt's last one."""
import types

__version__ = "0.0"
sampling_params = types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(DELTA="delta"))


class SamplingParams:
    def __init__(self, **options):
        assert options["ignore_eos"] is True
        self.__dict__.update(options)


class LLM:
    def __init__(self, model, **options):
        self.options, self.llm_engine, self.running = options, self, {}
        assert options["enable_prefix_caching"] is False
        assert options["generation_config"] == "vllm"

    def get_tokenizer(self):
        return types.SimpleNamespace(decode=lambda ids, **how: " ".join(f"w{i}" for i in ids))

    def get_metrics(self):
        return [types.SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=7.0)]

    def generate(self, prompts, params, use_tqdm):
        for i, (prompt, one) in enumerate(zip(prompts, params)):
            self.running[i] = [prompt["prompt_token_ids"][-1], one, one.max_tokens]
        ids = {i: [] for i in self.running}
        while self.running:
            for out in self.step():
                ids[out.request_id] += out.outputs[0].token_ids
        text = {i: " ".join(f"w{t}" for t in ids[i] if t not in params[i].stop_token_ids) for i in ids}
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids[i], text=text[i])]) for i in ids]

    def add_request(self, name, prompt, params):
        assert params.output_kind == "delta"
        self.running[name] = [prompt["prompt_token_ids"][-1], params, params.max_tokens]
        assert len(self.running) <= 2, "more at once than asked"

    def step(self):
        outs = []
        for name, one in list(self.running.items()):
            last, params, left = one
            ids = [last + 1, last + 2][:left]
            for i, token in enumerate(ids):
                if token in params.stop_token_ids:
                    ids = ids[: i + 1]
            done = left == len(ids) or ids[-1] in params.stop_token_ids
            one[0], one[2] = ids[-1], left - len(ids)
            if done:
                del self.running[name]
            output = types.SimpleNamespace(token_ids=ids)
            outs.append(types.SimpleNamespace(request_id=name, outputs=[output], finished=done))
        return outs
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")  # the script reports its version and threads
    (tmp_path / "vllm.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_vllm_gets_no_more_at_once_than_asked(stand_in: Path) -> None:
    """Catches all requests handed over together, ends of the model's own, and the ending token counted."""
    with opened(stand_in, "vllm_peer.py", "--cache", str(stand_in), stop=(43,)) as peer:
        asks = [ask((1, start), max_tokens=5) for start in (10, 20, 40, 60)]
        _, results = peer.run(asks, 2)
        facts = peer.describe()
    assert [ids_of(result) for result in results] == [
        list(range(11, 16)),
        list(range(21, 26)),
        [41, 42],
        list(range(61, 66)),
    ]
    assert [result.finish_reason for result in results] == ["length", "length", "stop", "length"]
    assert [result.tokens for result in results] == [5, 5, 2, 5]
    assert facts["engine"].startswith("vllm 0.0")
    assert "num_speculative_tokens" not in facts


def test_vllm_answers_by_its_public_call(stand_in: Path) -> None:
    """Catches a control that runs something else, or more at once than asked."""
    with opened(stand_in, "vllm_peer.py", "--public", "--cache", str(stand_in), stop=(43,)) as peer:
        _, results = peer.run([ask((1, start), max_tokens=5) for start in (10, 40, 60)], 2)
        _, (alone,) = peer.run([ask((1, 10), max_tokens=5)], 1)
        with pytest.raises(PeerError, match=r"concurrency=1 for 3 requests: LLM.generate\(\) runs 2 at once"):
            peer.run([ask()] * 3, 1)
        assert peer.describe()["runs"] == "LLM.generate()"
    assert [ids_of(result) for result in results] == [list(range(11, 16)), [41, 42], list(range(61, 66))]
    assert [(result.tokens, result.finish_reason) for result in results] == [(5, "length"), (2, "stop"), (5, "length")]
    assert ids_of(alone) == list(range(11, 16))
    assert alone.speculation is None


def test_vllm_does_not_sample_with_ngrams(stand_in: Path) -> None:
    """Catches nonsense measured as if it were an answer: at temperature > 0 its n-gram drafting on CPU is unsound."""
    with opened(stand_in, "vllm_peer.py", "--mode", "ngram", "--cache", str(stand_in)) as peer:
        _, (result,) = peer.run([ask((1, 10), max_tokens=5)], 1)
        assert peer.describe()["num_speculative_tokens"] == 5
        assert result.speculation is None  # without --counts nobody knows the drafts
        with pytest.raises(PeerError, match=r"temperature=0.7: .*never written.*possible here: temperature 0"):
            peer.run([ask(temperature=0.7)], 1)
