"""Files that are no models, damaged models and models of the wrong kind: typed errors, and the process survives."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backend.llamacpp import LlamaCppBackend
from paceline.backend.llamacpp.gguf import validate_gguf
from paceline.backend.llamacpp.refusals import refuse
from paceline.errors import InvalidParams, ModelError, ModelFormatError, ModelNotFound
from paceline.types import Segment

from . import gguf_files
from .conftest import TINY

Open = Callable[..., LlamaCppBackend]


def test_the_head_of_a_whole_file(tmp_path: Path) -> None:
    metadata, tensors = gguf_files.llama()
    path = gguf_files.write(tmp_path / "a.gguf", metadata, tensors)
    info = validate_gguf(path)
    assert (info.version, info.architecture, info.tensors) == (3, "llama", len(tensors))
    assert info.metadata["llama.block_count"] == 2
    assert info.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert info.metadata["tokenizer.ggml.add_bos_token"] is False
    assert info.arrays == {
        f"tokenizer.ggml.{name}": n for name, n in [("tokens", 261), ("token_type", 261), ("merges", 2)]
    }
    assert info.size == info.data_end == path.stat().st_size


def test_missing_directory_empty_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model file at .*nowhere\.gguf"):
        validate_gguf(tmp_path / "nowhere.gguf")
    (tmp_path / "some.gguf").write_bytes(b"")
    with pytest.raises(ModelFormatError, match=r"is a directory; give the \.gguf file itself; it holds some\.gguf"):
        validate_gguf(tmp_path)
    with pytest.raises(ModelFormatError, match="is not a GGUF file: it is empty"):
        validate_gguf(tmp_path / "some.gguf")
    (tmp_path / "zip").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ModelFormatError, match=r"is not a GGUF file: it starts with b'PK"):
        validate_gguf(tmp_path / "zip")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFormatError, match="is not a regular file"):
        validate_gguf(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "a.gguf", *gguf_files.llama())
    path.chmod(0)
    with pytest.raises(ModelFormatError, match=r"cannot read .*Permission denied"):
        validate_gguf(path)


def cuts() -> list[tuple[str, int]]:
    """Lengths that end inside every region: near its start, in its middle, one byte before its end."""
    at, found = 0, []
    for name, part in gguf_files.regions(*gguf_files.llama()).items():
        found += [(name, at + n) for n in sorted({1, 3, len(part) // 3, len(part) // 2, len(part) - 1})]
        at += len(part)
    return found


@pytest.mark.parametrize("region, length", cuts())
def test_a_file_cut_in_any_region(tmp_path: Path, region: str, length: int) -> None:
    path = gguf_files.write(tmp_path / "cut.gguf", *gguf_files.llama())
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    if whole[length:].strip(b"\0") == b"" and region == "tensor data":
        assert validate_gguf(path).data_end <= length  # only padding was cut
        return
    named = {"header": "header|not a GGUF", "metadata": "metadata", "tensor table": "tensor table|tensors need"}
    with pytest.raises(ModelFormatError, match=f"cut.gguf.*({named.get(region, 'is truncated: its tensors need')})"):
        validate_gguf(path)


def damaged(**changes: Any) -> bytes:
    metadata, tensors = gguf_files.llama()
    parts = gguf_files.regions({**metadata, **changes.get("metadata", {})}, tensors)
    raw = b"".join(parts.values())
    for at, new in changes.get("bytes", []):
        raw = raw[:at] + new + raw[at + len(new) :]
    return raw


TABLE = len(b"".join(list(gguf_files.regions(*gguf_files.llama()).values())[:2]))
FIRST_DIMS = TABLE + 8 + len("token_embd.weight")


@pytest.mark.parametrize(
    "raw, message",
    [
        (damaged(bytes=[(4, struct.pack("<I", 1))]), "GGUF version 1; versions 2 and 3 are read"),
        (damaged(bytes=[(4, struct.pack(">I", 3))]), "a big-endian file"),
        (damaged(bytes=[(8, struct.pack("<Q", 2**60))]), "claims 1152921504606846976 tensors"),
        (damaged(bytes=[(16, struct.pack("<Q", 2**60))]), "1152921504606846976 metadata entries"),
        (damaged(bytes=[(24, struct.pack("<Q", 2**50))]), "runs past the end"),
        (damaged(bytes=[(24, struct.pack("<Q", 0))]), "an empty key"),
        (damaged(bytes=[(24 + 8 + 20, struct.pack("<I", 77))]), "a value of unknown type 77 at key"),
        (damaged(metadata={"general.alignment": 24}), "general.alignment 24, which is not a power of two"),
        (damaged(metadata={"general.alignment": 0}), "general.alignment 0"),
        (damaged(metadata={"tokenizer.ggml.tokens": ["a", "b", "a"]}), "spells token 2 like an earlier one, b'a'"),
        (damaged(bytes=[(FIRST_DIMS, struct.pack("<I", 5))]), "gives tensor 'token_embd.weight' 5 dimensions"),
        (damaged(bytes=[(FIRST_DIMS + 20, struct.pack("<I", 4))]), "the unknown type 4"),
        (damaged(bytes=[(FIRST_DIMS + 20, struct.pack("<I", 10))]), "rows of 32, not a multiple of 256"),
        (damaged(bytes=[(FIRST_DIMS + 4, struct.pack("<Q", 2**40))]), "is truncated: its tensors need"),
    ],
)
def test_a_damaged_head(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelFormatError, match=message.replace(".", r"\.")) as caught:
        validate_gguf(path)
    assert "damaged.gguf" in str(caught.value)


def test_parts_of_a_split_model(tmp_path: Path) -> None:
    metadata, tensors = gguf_files.llama()
    split = {**metadata, "split.count": 2}
    first = gguf_files.write(tmp_path / "m-00001-of-00002.gguf", split, tensors)
    with pytest.raises(ModelNotFound, match=r"m-00002-of-00002\.gguf"):
        validate_gguf(first)
    second = gguf_files.write(tmp_path / "m-00002-of-00002.gguf", split, tensors)
    assert validate_gguf(first).path == first
    with pytest.raises(ModelFormatError, match="is part 2 of 2; give the first part"):
        validate_gguf(second)
    with pytest.raises(ModelFormatError, match="is one of 2 parts of a model, but is not named"):
        validate_gguf(first.rename(tmp_path / "renamed.gguf"))


# --- opening ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("no vocabulary", "has no vocabulary"),
        ("bert", "is an embedding model, by its vocabulary; only models that write text from left to right can be"),
        ("embedding", "is an embedding model"),
    ],
)
def test_models_of_the_wrong_kind_are_refused_by_name(tiny: Open, name: str, message: str) -> None:
    with pytest.raises(ModelFormatError, match=rf"{name}\.gguf {message}"):
        tiny(name, max_len=None)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"general.type": "adapter"}, "holds a 'adapter', not a model"),
        ({"general.architecture": ""}, "does not name its architecture"),
        ({"general.architecture": "perceptron"}, "unknown model architecture: 'perceptron'"),
        ({"llama.block_count": 2**31 - 1}, "block_count = 2147483647 is not in 1 .. 512"),
        ({"llama.context_length": 2**32 - 1}, "context_length = 4294967295"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "_epsilon = nan"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "_epsilon = -1.0"),
        ({"llama.embedding_length": 64}, "token_embd.weight"),
        ({"llama.attention.head_count": 0}, "tensor 'blk.0.attn_q.weight' has wrong shape"),
        ({"tokenizer.ggml.model": "morse"}, "unknown tokenizer: 'morse'"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused_in_llama_cpps_words(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    pytest.importorskip("llama_cpp")
    metadata, tensors = gguf_files.llama()
    path = gguf_files.write(tmp_path / "odd.gguf", {**metadata, **changes}, tensors)
    with pytest.raises(ModelFormatError, match=message.replace(".", r"\.")):
        LlamaCppBackend(path, n_threads=1)


def test_a_file_without_weights(tmp_path: Path) -> None:
    metadata, _ = gguf_files.llama()
    path = gguf_files.write(tmp_path / "vocab.gguf", metadata, {})
    with pytest.raises(ModelFormatError, match="holds no weights, only metadata"):
        LlamaCppBackend(path)


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("max_seqs", 0, "max_seqs = 0; allowed: an integer from 1 to 256"),
        ("max_seqs", 257, "max_seqs = 257"),
        ("max_seqs", True, "max_seqs = True"),
        ("max_seqs", "four", "max_seqs = 'four'"),
        ("max_len", 513, r"max_len = 513; allowed: at most 512, what llama\.gguf was trained for"),
        ("max_len", 0, "max_len = 0"),
        ("n_threads", 0, "n_threads = 0"),
        ("n_threads", 1.5, "n_threads = 1.5"),
        ("max_step_tokens", 0, "max_step_tokens = 0"),
        ("max_step_tokens", 5000, "max_step_tokens = 5000; allowed: at most kv_tokens = 1024"),
        ("kv_tokens", 255, "kv_tokens = 255; allowed: at least max_len = 256"),
    ],
)
def test_numbers_out_of_range(tiny: Open, option: str, value: object, message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        tiny("llama", **{option: value})


@pytest.mark.parametrize(
    "sizes",
    [{"max_step_tokens": 15}, {"max_step_tokens": 1}, {"max_len": 64, "max_seqs": 256, "max_step_tokens": 255}],
)
def test_a_step_has_room_for_every_sequence(tiny: Open, sizes: dict[str, int]) -> None:
    """llama.cpp would abort the process."""
    with pytest.raises(InvalidParams, match="allowed: at least max_seqs"):
        tiny("llama", **{"max_seqs": 16, **sizes})


@pytest.mark.parametrize("sizes", [{"max_len": 3}, {"max_len": 1}, {"max_len": 8, "max_seqs": 256}])
def test_small_contexts_still_hold_all_sequences(tiny: Open, sizes: dict[str, int]) -> None:
    info = tiny("llama", **{"max_seqs": 16, **sizes}).info
    assert info.max_step_tokens >= 2 * info.max_slots
    assert info.max_len == sizes["max_len"]


def test_defaults(tiny: Open) -> None:
    info = tiny("llama", max_seqs=16, max_len=None).info
    assert (info.max_len, info.kv_tokens, info.max_step_tokens, info.max_slots) == (512, 2048, 1024, 16)
    info = tiny("llama", max_seqs=1, max_len=None, kv_tokens=300).info
    assert (info.max_len, info.kv_tokens, info.max_step_tokens) == (300, 300, 300)


def test_numpy_integers_are_numbers_too(tiny: Open) -> None:
    assert tiny("llama", max_len=np.int64(64), max_seqs=np.int32(2)).info.max_len == 64


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"max_len": 4096}, (512, 2048)),
        ({"max_len": 100}, (100, 400)),
        ({"max_len": None}, (512, 2048)),
        ({"max_len": 4096, "kv_tokens": 300}, (300, 300)),
    ],
)
def test_a_max_len_that_is_only_an_upper_bound(tiny: Open, options: dict[str, Any], expected: tuple[int, int]) -> None:
    """For a drafter, which may be trained for less than its target."""
    info = tiny("llama", clip_max_len=True, **options).info
    assert (info.max_len, info.kv_tokens) == expected
    with pytest.raises(InvalidParams, match="max_len = 0"):
        tiny("llama", clip_max_len=True, max_len=0)


def test_loading_reports_its_progress_and_can_be_stopped(tiny: Open) -> None:
    seen: list[tuple[str, int, int | None]] = []
    tiny("llama", progress=lambda *report: seen.append(report))
    size = seen[-1][2]
    assert seen[-1] == ("loading llama.gguf", size, size)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny("llama", progress=stop)
    tiny("llama").check()


def test_llama_cpp_is_silent(tiny_path: Callable[[str], Path]) -> None:
    pytest.importorskip("llama_cpp")
    code = (
        "import sys; from paceline.backend.llamacpp import LlamaCppBackend\n"
        "for path in sys.argv[1:]:\n"
        "    try: LlamaCppBackend(path, n_threads=1).close()\n"
        "    except Exception as error: print(type(error).__name__)\n"
        "sys.stderr.write('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_path("llama")), str(tiny_path("no vocabulary"))],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ModelFormatError\n", "end")


def test_without_llama_cpp_python(tiny_path: Callable[[str], Path], survives: Callable[..., str]) -> None:
    code = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from paceline.backend.llamacpp import LlamaCppBackend\n"
        "try: LlamaCppBackend(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    said = survives(code, tiny_path("llama"))
    assert said.startswith("UnsupportedOption GGUF models need llama-cpp-python")
    assert "pip install 'paceline[llamacpp]'" in said


NASTY = """
import sys
from pathlib import Path
from paceline.backend.llamacpp import LlamaCppBackend
from paceline.errors import PacelineError
from paceline.types import Segment
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        backend = LlamaCppBackend(path, max_seqs=2, n_threads=1)
        slot = backend.acquire()
        for text in ("hello", "\u6f22\\0~"):
            backend.tokenizer.encode(text, parse_special=True)
        backend.forward([Segment(slot, (3, 4, 5), 0, 1)])
        backend.check()
        backend.close()
        print(path.name, "runs")
    except PacelineError as error:
        print(path.name, type(error).__name__)
"""


def test_no_file_ends_the_process(tmp_path: Path, survives: Callable[..., str]) -> None:
    """Cut, zeroed and scrambled files, one after the other in one process that lives to the end."""
    pytest.importorskip("llama_cpp")
    whole = gguf_files.write(tmp_path / "whole.gguf", *gguf_files.llama()).read_bytes()
    rng = np.random.default_rng(17)
    head = whole.index(b"token_embd.weight")
    for i in range(60):
        raw = bytearray(whole)
        at = int(rng.integers(0, head + 400))
        if i % 3 == 0:
            del raw[at:]
        elif i % 3 == 1:
            raw[at : at + 8] = bytes(8)
        else:
            raw[at : at + 4] = rng.bytes(4)
        (tmp_path / f"{i:02d}.gguf").write_bytes(raw)
    said = survives(NASTY, tmp_path).splitlines()
    assert len(said) == 61
    assert "whole.gguf runs" in said
    refused = [line for line in said if not line.endswith("runs")]
    assert len(refused) >= 20
    assert {line.split()[1] for line in refused} <= {"ModelFormatError", "BackendError", "InvalidParams"}


def without_bytes(vocabulary: dict[str, Any], first: int = 3, last: int = 258) -> dict[str, Any]:
    spelled = [f"zz{i}" if first <= i <= last else t for i, t in enumerate(vocabulary["tokenizer.ggml.tokens"])]
    return {**vocabulary, "tokenizer.ggml.tokens": spelled}


SPM = gguf_files.spm_vocabulary()
# Files that are whole and yet ended the process, each in an assert or an uncaught exception of llama.cpp.
FATAL: dict[str, tuple[str, dict[str, Any], str]] = {
    "too few experts": (
        "llama",
        {"llama.expert_count": 4, "llama.expert_used_count": 8},
        "llama.expert_used_count = 8 is not in 1 .. 4, its number of experts",
    ),
    "too many experts": ("llama", {"llama.expert_count": 10_000}, "llama.expert_count = 10000 is not in 0 .. 512"),
    "no experts used": ("llama", {"llama.expert_count": 4}, "llama.expert_used_count = 0 is not in 1 .. 4"),
    "experts by layer": ("llama", {"llama.expert_used_count": [0, 2]}, "llama.expert_used_count = 2 is not in 1 .. 0"),
    "experts in one layer": (
        "moe",
        {"llama.expert_used_count": [2, 0]},
        "layer 1 chooses among experts, and uses none",
    ),
    "expert groups": ("moe", {"llama.expert_group_count": 3}, "llama.expert_group_count = 3, of which 0 are used"),
    "groups without experts": ("llama", {"llama.expert_group_count": 1}, "does not fit 0 experts"),
    "prediction layers": ("llama", {"llama.nextn_predict_layers": 3}, "nextn_predict_layers = 3 is more than its 2"),
    "rope scaling": ("llama", {"llama.rope.scaling.type": "x"}, "llama.rope.scaling.type = 'x' is not one of none"),
    "heads of one": ("llama", {"llama.attention.head_count": 32}, "llama.rope.dimension_count = 1 is odd"),
    "odd rope": ("gemma2", {"gemma2.rope.dimension_count": 3}, "gemma2.rope.dimension_count = 3 is odd or more than"),
    "wide rope": ("gemma2", {"gemma2.rope.dimension_count_swa": 32}, "rope.dimension_count_swa = 32 is odd or more"),
    "heads by layer": ("llama", {"llama.attention.head_count": [2, 1]}, "layer 1 has 1 key heads, and keys of 32"),
    "keys by layer": ("llama", {"llama.attention.head_count_kv": [2, 0]}, "layer 1 has 0 key heads, and keys of 32"),
    "no window": ("gemma2", {"gemma2.attention.sliding_window_pattern": [0, 0]}, "leaves no layer a sliding window"),
    "no bytes": ("spm", without_bytes(SPM), "vocabulary lacks 252 of the 256 bytes, such as <0x00>"),
    "one byte missing": ("spm", without_bytes(SPM, 258, 258), "vocabulary lacks 1 of the 256 bytes, such as <0xFF>"),
    "wrong tokenizer": ("llama", {"tokenizer.ggml.model": "llama"}, "SentencePiece vocabulary lacks 162 of the 256"),
    "wordpiece": ("spm", {"tokenizer.ggml.model": "bert"}, "is an embedding model, by its vocabulary"),
    "rwkv": ("spm", {"tokenizer.ggml.model": "rwkv"}, "its RWKV vocabulary lacks 252 of the 256 bytes"),
}


def test_whole_files_that_llama_cpp_would_abort_on(tmp_path: Path, survives: Callable[..., str]) -> None:
    pytest.importorskip("llama_cpp")
    for name, (base, changes, _) in FATAL.items():
        metadata, tensors = TINY[base]
        gguf_files.write(tmp_path / name, {**metadata, **changes}, tensors)
    said = survives(NASTY.replace("type(error).__name__", "type(error).__name__, error"), tmp_path).splitlines()
    assert len(said) == len(FATAL)
    for line, name in zip(said, sorted(FATAL), strict=True):
        assert line.startswith(f"{name} ModelFormatError ")
        assert FATAL[name][2] in line


@pytest.mark.parametrize(
    "base, changes, shapes",
    [
        ("moe", {"llama.expert_group_count": 2, "llama.expert_group_used_count": 1}, {}),
        ("llama", {"llama.expert_count": 256, "llama.expert_used_count": [8, 6]}, {}),
        ("llama", {"llama.nextn_predict_layers": 1, "llama.rope.scaling.type": "yarn"}, {}),
        ("llama", {"llama.rope.dimension_count": 8, "llama.attention.key_length": 24}, {}),
        # Hybrid models: layers without attention, and recurrent ones whose keys are their own.
        ("llama", {"llama.attention.head_count_kv": [2, 0]}, {"blk.1.attn_k.weight": None}),
        ("llama", {"llama.attention.head_count_kv": [2, 0]}, {"blk.1.ssm_conv1d_k.weight": (32,)}),
        # Layers that differ in their key heads: fewer of the same length, or more of another one.
        ("llama", {"llama.attention.head_count_kv": [2, 1]}, {"blk.1.attn_k.weight": (16, 32)}),
        (
            "gemma2",
            {"gemma2.attention.head_count_kv": [1, 4], "gemma2.attention.key_length_swa": 8},
            {"blk.0.attn_k.weight": (16, 32)},
        ),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [1, 0]}, {}),
        ("spm", without_bytes(SPM, 3 + ord("h"), 3 + ord("h")), {}),  # "h" is a token itself
    ],
)
def test_what_real_models_do_is_not_refused(
    tmp_path: Path, base: str, changes: dict[str, Any], shapes: dict[str, Any]
) -> None:
    metadata, tensors = TINY[base]
    made = {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if shape}
    kept = {name: tensor for name, tensor in tensors.items() if name not in shapes}
    refuse(validate_gguf(gguf_files.write(tmp_path / "m.gguf", {**metadata, **changes}, {**kept, **made})))


def test_a_mixture_of_experts_runs(tiny: Open) -> None:
    backend = tiny("moe")
    rows = backend.forward([Segment(backend.acquire(), (3, 4, 5), 0, 1)])[0]
    assert np.isfinite(rows).all()


def sparse(path: Path, head: bytes, size: int) -> Path:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<Q", 2**33 - 100),  # a key
        gguf_files.string("k") + struct.pack("<IQ", 8, 2**32),  # a value
        gguf_files.string("k") + struct.pack("<IIQ", 9, 0, 2**32),  # a long list, and what follows it
        gguf_files.string("k") + struct.pack("<IIQQ", 9, 8, 2, 2**32),  # a list of strings
        gguf_files.string("tokenizer.ggml.tokens") + struct.pack("<IIQQ", 9, 8, 2, 2**32),
    ],
)
def test_a_sparse_file_that_claims_gigabytes(tmp_path: Path, head: bytes) -> None:
    path = sparse(tmp_path / "sparse.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + head, 2**33)
    with pytest.raises(ModelFormatError, match="runs past the first 134217728 bytes, and no model's does"):
        validate_gguf(path)


def test_a_tensor_that_comes_twice(tmp_path: Path) -> None:
    metadata, tensors = gguf_files.llama()
    raw = b"".join(gguf_files.regions(metadata, tensors).values())
    path = tmp_path / "twice.gguf"
    path.write_bytes(raw.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(ModelFormatError, match=r"names tensor 'blk\.0\.attn_q\.weight' twice"):
        validate_gguf(path)


def test_every_refusal_is_a_model_error() -> None:
    assert issubclass(ModelFormatError, ModelError)
    assert issubclass(ModelNotFound, ModelError)
