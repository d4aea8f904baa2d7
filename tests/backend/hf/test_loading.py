"""Models on their way in: what is read, what is refused in whose words, and what stays quiet."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402

from paceline.backend.hf import loading, runtime  # noqa: E402
from paceline.backend.hf.loading import LoadedModel, is_hub_id, load  # noqa: E402
from paceline.backend.hf.tokenizer import HFTokenizer, NoTokenizer  # noqa: E402
from paceline.errors import BackendError, InvalidParams, ModelFormatError, ModelNotFound, UnsupportedOption  # noqa: E402

from .. import gguf_files  # noqa: E402
from .models import SIZES, build, tokens  # noqa: E402
from .test_tokenizer import byte_level, saved  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(model: Any, **more: Any) -> LoadedModel:
    options: dict[str, Any] = {
        "dtype": None, "device": None, "max_len": None, "clip_max_len": False, "n_threads": None, "progress": None
    }  # fmt: skip
    return load(model, **{**options, **more})


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny-llama"
    build("llama", torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved_llama: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(saved_llama, tmp_path / "tiny-llama"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of a folder."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens(5, 20)]), use_cache=False).logits[0].double().numpy()


# --- folders ----------------------------------------------------------------------------------------


def test_a_folder(folder: Path) -> None:
    loaded = opened(folder)
    assert (loaded.name, loaded.max_len, loaded.vocab_size) == ("tiny-llama", 256, SIZES["vocab_size"])
    assert (loaded.dtype, str(loaded.device)) == (torch.float32, "cpu")
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert isinstance(loaded.tokenizer, NoTokenizer)
    np.testing.assert_array_equal(logits(loaded.model), logits(build("llama", torch.float32)))
    assert opened(str(folder)).name == "tiny-llama"


def test_dtypes(folder: Path) -> None:
    """Catches a dtype that is not what was asked for, and a default that ignores the file."""
    for name in loading.DTYPES:
        loaded = opened(folder, dtype=name)
        assert str(loaded.dtype) == f"torch.{name}"
        assert {p.dtype for p in loaded.model.parameters()} == {loaded.dtype}
    reconfigure(folder, dtype="bfloat16")
    assert opened(folder).dtype == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert opened(folder).dtype == torch.float32
    with pytest.raises(InvalidParams, match="dtype = 'bf16'; allowed: float64, float32, bfloat16, float16"):
        opened(folder, dtype="bf16")


def test_devices(folder: Path) -> None:
    assert opened(folder, device="cpu").device == torch.device("cpu")
    for junk in ("gpu", "", "meta"):
        with pytest.raises(InvalidParams, match=f"device = {junk!r}"):
            opened(folder, device=junk)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedOption, match=r"device = 'cuda' cannot be used here \(leave it out for cpu\): "):
            opened(folder, device="cuda")


def test_how_long(folder: Path) -> None:
    assert opened(folder, max_len=100).max_len == 100
    with pytest.raises(InvalidParams, match=r"max_len = 257; allowed: at most 256, what it was trained for"):
        opened(folder, max_len=257)
    assert opened(folder, max_len=257, clip_max_len=True).max_len == 256
    with pytest.raises(InvalidParams, match="max_len = 0"):
        opened(folder, max_len=0)
    reconfigure(folder, max_position_embeddings=100_000)
    assert opened(folder).max_len == 4096


def test_every_end_that_the_files_name(folder: Path) -> None:
    """Catches a chat model that does not stop at the end of its turn."""
    assert opened(folder).stop_ids == frozenset()
    reconfigure(folder, eos_token_id=5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 9999]}))
    assert opened(folder).stop_ids == {5, 7, 9}
    rewrite(folder, lambda w: w.update({k: torch.randn(300, 32) for k in w if "embed" in k or "lm_head" in k}))
    reconfigure(folder, vocab_size=300)
    config = (folder / "config.json").read_text()
    saved(folder, byte_level(), eos_token="<|im_end|>")
    (folder / "config.json").write_text(config)
    loaded = opened(folder)
    assert loaded.stop_ids == {5, 7, 9, 257}
    assert isinstance(loaded.tokenizer, HFTokenizer)


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    build("llama", torch.float32, tie_word_embeddings=True).save_pretrained(tmp_path)
    loaded = opened(tmp_path)
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()


KEY = "model.layers.1.mlp.up_proj.weight"


def _more(weights: dict[str, Any]) -> None:
    weights["model.layers.1.mlp.side_proj.weight"] = torch.zeros(2)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda w: w.pop(KEY), f"they lack {KEY}"),
        (_more, "they also hold model.layers.1.mlp.side_proj.weight"),
        (lambda w: w.update({KEY: torch.zeros(3, 32)}), f"they hold in another shape {KEY}"),
        (lambda w: [w.pop(k) for k in list(w) if "layers.2" in k], "and 4 more"),
    ],
    ids=["missing", "unexpected", "shape", "many"],
)
def test_no_half_read_model(folder: Path, change: Callable[[dict[str, Any]], Any], said: str) -> None:
    """Catches weights that transformers would make up at random, or leave out, with a warning at most."""
    rewrite(folder, change)
    with pytest.raises(ModelFormatError, match="tiny-llama") as caught:
        opened(folder)
    assert said in str(caught.value)


def test_pickles_are_never_read(folder: Path) -> None:
    """Catches code that runs while weights are read."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match="holds no weights"):
        opened(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelFormatError, match=r"weights in pytorch_model\.bin: pickles may run code"):
        opened(folder)


def test_code_of_a_model_never_runs(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("raise SystemExit('ran')")
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    reconfigure(folder, auto_map=own)
    assert opened(folder).name == "tiny-llama"  # transformers' own class for this type
    reconfigure(folder, model_type="own")
    with pytest.raises(ModelFormatError, match=r"tiny-llama \(own\) comes with code of its own, which is never run"):
        opened(folder)
    reconfigure(folder, auto_map=None)
    with pytest.raises(ModelFormatError, match="knows no model_type 'own'"):
        opened(folder)


def test_other_folders_and_files(folder: Path, tmp_path: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFormatError, match="holds an adapter"):
        opened(folder)
    (folder / "adapter_config.json").unlink()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFormatError, match="transformers cannot load tiny-llama: "):
        opened(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match="transformers cannot load tiny-llama: "):
        opened(folder)
    (folder / "config.json").unlink()
    (folder / "some.gguf").touch()
    with pytest.raises(ModelFormatError, match=r"no config\.json.*it holds some\.gguf"):
        opened(folder)
    with pytest.raises(ModelFormatError, match="is not a GGUF file"):
        opened(folder / "some.gguf")
    for nowhere in (tmp_path / "nowhere", "nowhere", "~nouser/x", "n" * 5000):
        with pytest.raises(ModelNotFound):
            opened(nowhere)


def test_refused_before_its_weights_are_read(folder: Path) -> None:
    """Catches minutes of loading before a refusal: the file could not be read at all."""
    (folder / "model.safetensors").write_bytes(b"")
    reconfigure(folder, is_causal=False)
    with pytest.raises(ModelFormatError, match="see what comes behind them"):
        opened(folder)
    reconfigure(folder, model_type="t5")
    with pytest.raises(ModelFormatError, match=r"not know as a causal language model|has an encoder"):
        opened(folder)


def test_hub_ids_by_form() -> None:
    for name in ("owner/name", "Qwen/Qwen3-0.6B", "a/b.c_d"):
        assert is_hub_id(name)
    for name in ("./name", "/owner/name", "a/b/c", "name", "~/name", "a/b.gguf", "../b", ""):
        assert not is_hub_id(name)


HUB = """
import sys
from paceline.backend.hf.loading import load
from paceline.errors import PacelineError
options = dict(dtype=None, device=None, max_len=None, clip_max_len=False, n_threads=1, progress=None)
for name in sys.argv[1:]:
    try:
        print(load(name, **options).name)
    except PacelineError as error:
        print(type(error).__name__, error)
"""


def test_hub_ids(saved_llama: Path, tmp_path: Path) -> None:
    """Catches another way of resolving than transformers' own cache, and tracebacks or talk of the hub client.

    In a process of its own: the client reads its environment once, and transformers logs past pytest.
    """

    def cached(name: str) -> Path:
        repository, commit = tmp_path / f"models--owner--{name}", "0" * 40
        shutil.copytree(saved_llama, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        return repository / "snapshots" / commit

    cached("whole")
    rewrite(cached("spoilt"), lambda w: w.pop(KEY))
    pickled = cached("pickled")
    torch.save({}, pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    names = [f"owner/{name}" for name in ("whole", "spoilt", "pickled", "absent")]
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HUB, *names], capture_output=True, text=True, env={**os.environ, **offline}, timeout=300
    )
    assert done.stderr == ""  # where transformers would print tables and bars
    whole, spoilt, pickles, absent = done.stdout.splitlines()
    assert whole == "owner/whole"
    assert spoilt.startswith(
        f"ModelFormatError the weights of owner/spoilt are not its configuration's: they lack {KEY}"
    )
    assert pickles.startswith("ModelDownloadError owner/pickled")
    assert "never from pickles" in pickles
    assert absent.startswith("ModelDownloadError owner/absent could not be fetched from the hub (")


# --- GGUF files -------------------------------------------------------------------------------------


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    return gguf_files.write(tmp_path / "tiny.gguf", *gguf_llama())


def gguf_llama(**says: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tiny file that says how many heads its keys have, as every converter writes."""
    metadata, weights = gguf_files.llama()
    return {**metadata, "llama.attention.head_count_kv": 2, **says}, dict(weights)


def test_a_gguf_is_the_same_model_as_in_llamacpp(gguf_path: Path) -> None:
    """Catches weights that stay packed, are permuted the wrong way or rounded on the way."""
    pytest.importorskip("llama_cpp")
    from paceline.backend.llamacpp import LlamaCppBackend
    from paceline.types import Segment

    loaded = opened(gguf_path, dtype="float32")
    assert (loaded.name, loaded.max_len, loaded.dtype) == ("tiny.gguf", 512, torch.float32)
    ids = tokens(2, 30)
    backend = LlamaCppBackend(gguf_path, max_len=64, max_seqs=1, n_threads=1)
    theirs = np.array(backend.forward([Segment(backend.acquire(), ids, 0, 30)])[0])
    backend.close()
    with torch.inference_mode():
        ours = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=0.02 * theirs.std())  # its keys and values are float16
    assert loaded.stop_ids == {0, 2}
    assert loaded.tokenizer.encode("hel") == [3 + 256 + 1]  # one token of gguf_files.bpe_vocabulary


def test_a_gguf_becomes_bfloat16(gguf_path: Path) -> None:
    """Catches packed weights: every parameter is a dense one, and nothing of the quantiser is left."""
    loaded = opened(gguf_path)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert all(
        type(m).__name__ in ("Linear", "Embedding")
        for m in loaded.model.modules()
        if hasattr(m, "weight") and m.weight.dim() == 2
    )
    assert loaded.tokenizer.encode("hel") == [3 + 256 + 1]  # one token of gguf_files.bpe_vocabulary


def test_a_gguf_is_asked_to_be_dequantised(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches weights that stay packed where a kernel for them happens to be installed."""
    asked: list[Any] = []
    before = transformers.AutoModelForCausalLM.from_pretrained

    def spy(*where: Any, **how: Any) -> Any:
        asked.append(how["quantization_config"].dequantize)
        return before(*where, **how)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", spy)
    opened(gguf_path)
    assert asked == [True]


def test_ggufs_that_are_refused(tmp_path: Path) -> None:
    """Catches files of which transformers would leave something out without a word, and make another model."""
    pytest.importorskip("gguf")

    def refused(metadata: Any, weights: Any, reason: str) -> None:
        path = gguf_files.write(tmp_path / "tiny.gguf", metadata, weights)
        with pytest.raises(
            ModelFormatError, match=r"tiny\.gguf cannot be served by backend 'hf', only by 'llamacpp'"
        ) as e:
            opened(path)
        assert reason in str(e.value)

    refused(*gguf_files.mamba(), "not 'mamba'")
    refused(*gguf_files.gemma2(window=8), "not 'gemma2'")
    refused(*gguf_files.moe(), "llama.expert_count")
    refused(*gguf_files.llama(), "head_count_kv")
    refused(*gguf_llama(**{"llama.rope.scaling.type": "yarn"}), "llama.rope.scaling.type")
    refused(*gguf_llama(**{"llama.rope.dimension_count": 8}), "llama.rope.dimension_count = 8")
    metadata, weights = gguf_llama()
    refused(metadata, {**weights, "rope_freqs.weight": np.ones(8, np.float32)}, "'rope_freqs.weight'")
    part = tmp_path / "tiny-00001-of-00002.gguf"
    gguf_files.write(part, {**metadata, "split.count": 2, "split.no": 0}, weights)
    gguf_files.write(tmp_path / "tiny-00002-of-00002.gguf", {**metadata, "split.count": 2, "split.no": 1}, weights)
    with pytest.raises(UnsupportedOption, match="merge them"):
        opened(part)


# --- open models ------------------------------------------------------------------------------------


def test_an_open_model_is_used_as_it_is() -> None:
    model = build("llama").train()
    loaded = opened(model)
    assert loaded.model is model
    assert not model.training
    assert (loaded.name, loaded.dtype, loaded.max_len) == ("LlamaForCausalLM", torch.float64, 256)
    assert model.config._attn_implementation == "sdpa"
    assert opened(model, dtype="float64", device="cpu").model is model
    with pytest.raises(InvalidParams, match="dtype = 'float32'; LlamaForCausalLM is open already, in float64"):
        opened(model, dtype="float32")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    with pytest.raises(UnsupportedOption, match="LlamaForCausalLM takes no text"):
        loaded.tokenizer.encode("a")
    mine = NoTokenizer("mine", 61)
    assert opened(model, tokenizer=mine).tokenizer is mine
    with pytest.raises(InvalidParams, match="model = 5"):
        opened(5)


def test_an_open_model_is_refused_by_the_same_rules() -> None:
    model = build("llama")
    model.config.is_causal = False
    with pytest.raises(ModelFormatError, match="LlamaForCausalLM"):
        opened(model)


# --- manners ----------------------------------------------------------------------------------------


def test_progress_and_silence(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches bars and warnings of transformers, and its settings left changed."""
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(31)
    logging.enable_progress_bar()
    seen: list[tuple[str, int, int | None]] = []
    opened(folder, progress=lambda *step: seen.append(step))
    size = (folder / "model.safetensors").stat().st_size
    done = [step[1] for step in seen]
    assert {(step[0], step[2]) for step in seen} == {("loading tiny-llama", size)}
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, size)
    assert len(done) > 10
    rewrite(folder, lambda w: w.pop(KEY))
    with pytest.raises(ModelFormatError):
        opened(folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled()) == (
        31,
        True,
        False,
    )
    logging.set_verbosity(level)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_a_gguf_is_silent_too(gguf_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    opened(gguf_path)
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_while_loading(folder: Path) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(folder, progress=stop)
    assert opened(folder).name == "tiny-llama"


def test_threads_are_left_alone_unless_given(folder: Path) -> None:
    opened(folder)
    assert torch.get_num_threads() == 1
    opened(folder, n_threads=2)
    assert torch.get_num_threads() == 2
    with pytest.raises(InvalidParams, match="n_threads = 0"):
        opened(folder, n_threads=0)


@pytest.mark.parametrize("missing", ["torch", "transformers", "gguf", "accelerate"])
def test_what_is_missing_is_named(missing: str, gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None if name == missing else there(name))
    with pytest.raises(UnsupportedOption, match=rf"needs {missing}, not installed here.*pip install 'paceline\[hf\]'"):
        opened(gguf_path)


def test_transformers_4_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.3")
    with pytest.raises(UnsupportedOption, match=r"transformers 5 or newer, and 4\.57\.3 is installed"):
        opened(folder)


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, paceline.backend.hf.loading, paceline.models; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["[]", "null", '{"model_type": ["llama"]}', "{}", "3"])
def test_a_configuration_that_is_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFormatError, match="names no model_type"):
        opened(folder)


@pytest.mark.parametrize("ids", ["2", [1, "2"], 1.5])
def test_end_ids_that_are_no_numbers(folder: Path, ids: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelFormatError):
        opened(folder)


def test_too_little_memory_is_no_fault_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(BackendError, match="too little memory to load tiny-llama"):
        opened(folder)
