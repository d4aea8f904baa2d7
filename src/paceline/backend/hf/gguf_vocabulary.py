"""The tokenizer of a GGUF file, built from its vocabulary to split text as llama.cpp does.

The file names its way of splitting text into words (tokenizer.ggml.pre) but does not hold it, so every way is a line of
the table here, compared with llama.cpp's own by tests. Others are refused: wrong tokens would look like a bad
model.
"""

from __future__ import annotations

from typing import Any

from ..llamacpp.gguf import GgufInfo
from .tokenizer import HFTokenizer, NoTokenizer

__all__ = ["gguf_tokenizer"]

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"

# tokenizer.ggml.pre -> (pattern of the pieces cut out first, or None; whether GPT-2's own pattern cuts the rest;
# whether a word that is a token is taken whole; whether begin-of-sequence is put in front where the file is silent)
SPLITS: dict[str, tuple[str | None, bool, bool, bool]] = {
    "gpt-2": (None, True, False, False),
    "smollm": (r"\p{N}", True, False, False),
    "llama-bpe": (LLAMA3, False, True, True),
    "qwen2": (QWEN2, False, False, False),
}
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
ENDS = ("eos", "eot", "eom")
# Control tokens that end a turn or a document whatever the file's own keys say, by the names families gave them.
END_TEXTS = {
    *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>"),
    *("<|eot|>", "</s>"),
}


def gguf_tokenizer(info: GgufInfo, vocab_size: int) -> HFTokenizer | NoTokenizer:
    """The tokenizer of a GGUF file; a NoTokenizer where llama.cpp's way of splitting is not known here."""
    name, kind = info.path.name, info.metadata.get("tokenizer.ggml.model")
    split = info.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in SPLITS:
        why = f"how its vocabulary (model {kind!r}, pre {split!r}) splits text is not known to backend 'hf'"
        return NoTokenizer(name, vocab_size, f"{why}, only to 'llamacpp'")
    tokens, types, merges = _arrays(info)
    fast = _pipeline(tokens, types, merges, str(split))
    ids = {end: info.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", *ENDS)}
    texts = {end: tokens[token] for end, token in ids.items() if isinstance(token, int) and 0 <= token < len(tokens)}
    adds_bos = bool(info.metadata.get("tokenizer.ggml.add_bos_token", SPLITS[str(split)][3])) and "bos" in texts
    named = {token for end, token in ids.items() if end in ENDS and isinstance(token, int)}
    known = {i for i, text in enumerate(tokens) if types[i] == CONTROL and text in END_TEXTS}
    template = info.metadata.get("tokenizer.chat_template")
    return HFTokenizer(
        fast,
        name=name,
        vocab_size=vocab_size,
        begin=[int(ids["bos"] or 0)] if adds_bos else [],
        stop_ids=frozenset(named | known),
        template=str(template) if template else None,
        variables={f"{end}_token": text for end, text in texts.items() if end in ("bos", "eos")},
    )


def _arrays(info: GgufInfo) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    """Tokens, their types, and merges."""
    from gguf import GGUFReader

    fields = GGUFReader(info.path).fields

    def array(name: str) -> list[Any]:
        field = fields.get(f"tokenizer.ggml.{name}")
        return [] if field is None else list(field.contents())

    tokens = [str(token) for token in array("tokens")]
    types = [int(kind) for kind in array("token_type")] or [1] * len(tokens)
    merges = []
    for merge in array("merges"):
        left, _, right = str(merge).partition(" ")
        merges.append((left, right))
    return tokens, types, merges


def _pipeline(tokens: list[str], types: list[int], merges: list[tuple[str, str]], split: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    pattern, gpt2, whole_words, _ = SPLITS[split]
    vocabulary = {text: token for token, text in enumerate(tokens)}
    known = [(a, b) for a, b in merges if a in vocabulary and b in vocabulary and a + b in vocabulary]
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=known, ignore_merges=whole_words))
    steps: list[Any] = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2))
    fast.pre_tokenizer = pre_tokenizers.Sequence(steps)
    fast.decoder = decoders.ByteLevel()
    for kinds, special in (({UNKNOWN, CONTROL}, True), ({USER_DEFINED}, False)):
        added = [tokens[i] for i, kind in enumerate(types) if kind in kinds]
        fast.add_tokens([AddedToken(text, normalized=False, special=special) for text in added])
    return fast
