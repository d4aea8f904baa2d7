"""What was meant by an option that no command has: names that other programs use, and those of the library."""

from __future__ import annotations

import re

from ..params import REFUSED

__all__ = ["hint_for_option"]

# Where the shell's answer is another than the library's.
_HERE = {
    "use --n for samples, --max-tokens for their length": ("n",),
    "use --max-tokens": ("num_tokens", "length"),
    "use --max-len": ("c", "ctx_size", "n_ctx", "num_ctx", "max_model_len", "context_length"),
    "use --threads": ("t", "n_threads"),
    "use --temperature": ("T",),
    "use --temperature 0, which is greedy": ("greedy", "do_sample"),
    "use --logprobs N": (
        *("top_logprobs", "top_logprobs_num", "num_logprobs", "return_logprob", "n_probs", "logprob_token_ids"),
    ),
    "use --seed": ("s",),
    "use --repetition-penalty": ("rp",),
    "use --json-schema FILE": (
        *("j", "jf", "json_schema_file", "schema", "guided_json", "response_format", "guided_choice", "choice"),
    ),
    "use --json-object": ("json", "json_mode"),
    "use --regex REGEX": ("guided_regex",),
    "use --lark FILE, a grammar in Lark's notation": ("guided_grammar", "ebnf", "gbnf", "grammar", "grammar_file"),
    "use --no-whitespace": ("whitespace", "guided_whitespace_pattern"),
    "use --grammar-after TEXT": ("grammar_lazy", "grammar_triggers"),
    "use --include-stop": ("include_stop_str_in_output",),
    "use --stop TEXT": ("r", "reverse_prompt"),
    "use --prompt-file FILE": ("f", "file"),
    "use --chat for the model's template, --raw for none": ("cnv", "conversation", "no_cnv", "no_conversation"),
    "use --logit-bias ID=-100, or --bad-words TEXT": (
        *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "bad_words_token_ids"),
    ),
    "use --drafter model:M": ("md", "model_draft", "speculative_model", "assistant_model", "draft_model"),
    "use --draft-length": ("draft", "draft_max", "draft_n", "num_draft_tokens", "num_speculative_tokens"),
    "use --drafter lookup": ("ngram", "prompt_lookup", "prompt_lookup_num_tokens"),
    "text streams by itself; --format json waits for the end": ("stream", "output_kind", "no_stream"),
    "--format json has the prompt's length, and never its text": ("echo", "no_display_prompt"),
    "a function of Python: use the library": ("logits_processors", "logits_processor", "custom_logit_processor"),
}
_SHELL = {name: hint for hint, names in _HERE.items() for name in names}


def hint_for_option(option: str, offered: set[str]) -> str | None:
    """What to do instead of `option`, as it was typed. offered: the command's own options, with their dashes.

    None where nobody knows, or where the command has nothing of what could be meant.
    """
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    spelled = f"--{name.replace('_', '-')}"
    hint = _SHELL.get(name)
    if hint is None and spelled in offered and spelled != option:
        hint = f"use {spelled}"
    if hint is None and name in REFUSED and "--temperature" in offered:
        hint = _in_a_shell(REFUSED[name])
    return hint if hint is not None and set(re.findall(r"--[a-z][a-z-]*", hint)) <= offered else None


def _in_a_shell(why: str) -> str:
    """The library's reason, in the words of a shell."""
    renamed = re.match(r"(\w+) is the name$", why)
    if renamed:
        return f"use --{renamed[1].replace('_', '-')}"
    if "grammar = {" in why:
        return "use --json-schema, --json-object, --regex or --lark"
    return f"{why} (of the library; a shell has no functions to give)" if "logits_processors" in why else why
