"""Every option of `generate` does what SamplingParams and LLM do with it, and says no where they do."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from typer.main import get_command

from paceline import LLM, SamplingParams
from paceline.cli.app import app
from paceline.cli.constraints import ConstraintOptions
from paceline.cli.hints import _SHELL, hint_for_option
from paceline.cli.options import ModelOptions
from paceline.cli.sampling import NO_LIMIT, SamplingOptions, parse_bias, parse_max_tokens
from paceline.params import REFUSED

from .shell import error_line, paceline, toy

PROMPT = ["--raw", "--prompt", "the cat sat on the mat", "--max-tokens", "40"]
ID_A = 10  # of the toy's "a"
END = 256  # the toy's stop id


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("toy")


def tokens_of(llm: LLM, **params: Any) -> list[int]:
    prompt = "the cat sat on the mat"
    return list(llm.generate(prompt, SamplingParams(**{"max_tokens": 40, **params}))[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    ("arguments", "params"),
    [
        (["--max-tokens", "7"], {"max_tokens": 7}),
        (["--temperature", "0"], {"temperature": 0.0}),
        (["--temperature", "3"], {"temperature": 3.0}),
        (["--top-k", "2"], {"top_k": 2}),
        (["--top-p", "0.3"], {"top_p": 0.3}),
        (["--min-p", "0.5"], {"min_p": 0.5}),
        (["--presence-penalty", "2"], {"presence_penalty": 2.0}),
        (["--frequency-penalty", "-2"], {"frequency_penalty": -2.0}),
        (["--repetition-penalty", "1.7"], {"repetition_penalty": 1.7}),
        (["--logit-bias", "10=5", "--logit-bias", "11=-100"], {"logit_bias": {10: 5.0, 11: -100.0}}),
        (["--seed", "2"], {"seed": 2}),
        (["--stop-token-ids", "10", "--stop-token-ids", "11"], {"stop_token_ids": [10, 11]}),
        (["--stop", "d", "--stop", "s"], {"stop": ["d", "s"]}),
        (["--stop-token-ids", "16", "--min-tokens", "9"], {"stop_token_ids": [16], "min_tokens": 9}),
        (["--bad-words", "g", "--bad-words", "zj"], {"bad_words": ["g", "zj"]}),
        (["--allowed-token-ids", "10", "--allowed-token-ids", "11"], {"allowed_token_ids": [10, 11]}),
        (["--stop-token-ids", "10,11"], {"stop_token_ids": [10, 11]}),
        (["--allowed-token-ids", "10, 11", "--allowed-token-ids", "12"], {"allowed_token_ids": [10, 11, 12]}),
        (["--logit-bias", "10=5,11=-100"], {"logit_bias": {10: 5.0, 11: -100.0}}),
        (["--regex", "[a-c]+x"], {"grammar": {"regex": "[a-c]+x"}}),
        (["--json-object"], {"grammar": {"json_object": True}}),
        (["--json-object", "--no-whitespace"], {"grammar": {"json_object": True, "whitespace": False}}),
        (["--regex", "[0-9]+", "--grammar-after", "rc"], {"grammar": {"regex": "[0-9]+"}, "grammar_after": "rc"}),
        (["--regex", "[0-9]+", "--grammar-after-id", "18"], {"grammar": {"regex": "[0-9]+"}, "grammar_after": 18}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_option_is_the_parameter_of_the_same_name(llm: LLM, arguments: list[str], params: dict[str, Any]) -> None:
    expected = tokens_of(llm, **{"seed": 1, **params})
    assert expected != tokens_of(llm, seed=1), "the case cannot tell the option from its absence"
    assert toy(*PROMPT, "--seed", "1", *arguments)["token_ids"] == expected


# Options of another name than the parameter they are, or are part of.
RENAMED = {
    "include_stop": "include_stop_str_in_output",
    "json_schema": "grammar",
    "json_object": "grammar",
    "regex": "grammar",
    "lark": "grammar",
    "lenient": "grammar",
    "no_whitespace": "grammar",
    "grammar_after_id": "grammar_after",
}
NOT_IN_A_SHELL = {"logits_processors": "functions and objects of Python"}


def test_every_parameter_is_an_option_and_nothing_else_is() -> None:
    offered = {f.name for f in (*fields(SamplingOptions), *fields(ConstraintOptions))}
    assert {RENAMED.get(name, name) for name in offered} == {f.name for f in fields(SamplingParams)} - set(
        NOT_IN_A_SHELL
    )
    assert set(RENAMED) <= offered


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_option_has_a_help_text(command: str) -> None:
    shown = paceline(command, "--help", COLUMNS="200").stdout
    for f in (*fields(SamplingOptions), *fields(ConstraintOptions)):
        assert f"--{f.name.replace('_', '-')} " in shown


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_texts_come_out_whole(command: str) -> None:
    """Catches what a help page swallows: `</think>` is markup to it."""
    shown = paceline(command, "--help", COLUMNS="600").stdout
    for kind in (SamplingOptions, ConstraintOptions, ModelOptions):
        for name, hint in get_type_hints(kind, include_extras=True).items():
            said = hint.__metadata__[0].help.replace("`", "")
            assert said in shown, name
    assert "such as </think>." in shown


GENERATE = {
    option
    for p in get_command(app).commands["generate"].params  # type: ignore[attr-defined]
    for option in (*p.opts, *p.secondary_opts)
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temp", "3"], "No such option: --temp; use --temperature"),
        (["--repeat-penalty=1.1"], "use --repetition-penalty"),
        (["--top_k", "3"], "use --top-k"),
        (["-n", "3"], "use --n for samples, --max-tokens for their length"),
        (["--max_new_tokens", "3"], "use --max-tokens"),
        (["--best-of", "3"], "ask for n samples and choose"),
        (["--grammar-file", "x"], "use --lark FILE"),
        (["--structural-tag", "x"], "use --json-schema, --json-object, --regex or --lark"),
        (["--dry-multiplier", "1"], "of the library; a shell has no functions"),
        (["--frobnicate"], "No such option: --frobnicate"),
        (["hello"], "a prompt is given with --prompt TEXT, or -p, in quotes"),
    ],
)
def test_what_was_meant_is_said(arguments: list[str], said: str) -> None:
    result = paceline("generate", "--model", "toy", *arguments)
    assert result.exit_code == 2
    assert said in error_line(result)


def test_hints_of_a_shell_name_what_there_is() -> None:
    """Every hint has only options of `generate`, and none of Python's notation for a grammar."""
    for name in {*REFUSED, *_SHELL}:
        option = f"--{name.replace('_', '-')}"
        if option not in GENERATE:
            hint = hint_for_option(option, GENERATE)
            assert hint is not None, name
            assert "{" not in hint
    assert set(re.findall(r"--[a-z-]+", " ".join(_SHELL.values()))) <= GENERATE
    assert hint_for_option("--gbnf", GENERATE - {"--lark"}) is None
    assert hint_for_option("--best-of", {"--help"}) is None
    said = paceline("chat", "--model", "toy", "hello")
    assert said.exit_code == 2
    assert "is typed, or piped in" in error_line(said)


def test_defaults_are_those_of_the_library() -> None:
    assert SamplingOptions().params(**ConstraintOptions().keywords(stdin_taken="the prompt")) == SamplingParams()


def test_stop_strings_are_cut_off_or_kept() -> None:
    base = [*PROMPT, "--seed", "1"]
    text = toy(*base)["text"]
    stop = text[10:12]
    cut, kept = toy(*base, "--stop", stop), toy(*base, "--stop", stop, "--include-stop")
    assert cut["text"] == text[: text.index(stop)]
    assert kept["text"] == cut["text"] + stop
    assert cut["finish_reason"] == kept["finish_reason"] == "stop"
    assert cut["stop_reason"] == kept["stop_reason"] == stop


def test_the_end_token_stops_unless_it_is_ignored() -> None:
    eager = [*PROMPT, "--logit-bias", f"{END}=100", "--max-tokens", "5"]
    stopped, ignored = toy(*eager), toy(*eager, "--ignore-eos")
    assert (stopped["finish_reason"], stopped["token_ids"], stopped["stop_reason"]) == ("stop", [END], END)
    assert (ignored["finish_reason"], ignored["token_ids"]) == ("length", [END] * 5)


def test_max_tokens_none_fills_the_context() -> None:
    result = toy(*PROMPT, "--ignore-eos", "--max-len", "100", "--max-tokens", NO_LIMIT)
    assert result["usage"]["total_tokens"] == 100
    assert result["finish_reason"] == "length"


def test_draft_length_and_drafter() -> None:
    own = ["--drafter", "model:toy", *PROMPT]
    three = toy(*own, "--draft-length", "3")
    assert (three["drafter"], three["draft_length"]) == ("model:toy", 3)
    assert len(three["speculation"]["drafted_at"]) == 3
    assert three["speculation"]["acceptance_rate"] == 1.0
    assert set(three["token_kinds"]) == {"accepted", "bonus"}
    off = toy(*own, "--draft-length", "0")
    assert (off["speculation"]["drafted"], off["speculation"]["tokens_per_step"]) == (0, 1.0)
    assert toy(*PROMPT)["drafter"] == toy(*PROMPT, "--drafter", "auto")["drafter"] == "forced+lookup"
    for name in ("none", "lookup", "forced", "forced+model:toy:5"):
        assert toy(*PROMPT, "--drafter", name)["drafter"] == name


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
def test_verification(verification: str) -> None:
    result = toy(*PROMPT, "--drafter", "model:toy:5", "--seed", "1", "--verification", verification)
    assert result["verification"] == verification


def test_another_model_another_text() -> None:
    assert toy(*PROMPT, "--seed", "1", "--model", "toy:7")["text"] != toy(*PROMPT, "--seed", "1")["text"]
    assert toy(*PROMPT, "--model", "toy:7", "--backend", "toy")["model"] == "toy:7"


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_how_a_model_is_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option that is read and goes nowhere."""
    from paceline import LLM
    from paceline.errors import ModelError

    given: dict[str, Any] = {}

    def stop(self: LLM, model: str, **options: Any) -> None:
        given.update(options)
        raise ModelError("far enough")

    monkeypatch.setattr(LLM, "__init__", stop)
    options = ["--backend", "hf", "--dtype", "float32", "--device", "cuda:1", "--page-size", "64", "--compile"]
    options += ["--no-prefix-cache", "--threads", "3", "--max-len", "77"]
    expected = {"backend": "hf", "dtype": "float32", "device": "cuda:1", "page_size": 64, "compile": True}
    expected |= {"prefix_cache": False, "n_threads": 3, "max_len": 77, "max_seqs": 1}
    result = paceline(command, "--model", "owner/name", *options, stdin="hello\n")
    assert "far enough" in result.stderr
    assert expected.items() <= given.items()
    given.clear()
    paceline(command, "--model", "owner/name", "--no-compile", stdin="hello\n")
    assert (given["compile"], given["prefix_cache"], given["dtype"], given["backend"]) == (False, None, None, "auto")


def test_chat_is_the_default_where_the_model_has_a_template() -> None:
    sizes = {
        mode: toy(*mode, "--prompt", "hello", "--max-tokens", "1")["usage"]["prompt_tokens"]
        for mode in ((), ("--chat",), ("--raw",))
    }
    assert sizes[()] == sizes["--chat",] == len("user: hello\nassistant: ")
    assert sizes["--raw",] == len("hello")


def test_a_model_without_a_template_continues_the_prompt_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.backend.toy import ToyTokenizer
    from paceline.errors import UnsupportedOption

    def none(self: ToyTokenizer, messages: object) -> str:
        raise UnsupportedOption("toy has no chat template; give text instead")

    monkeypatch.setattr(ToyTokenizer, "apply_chat_template", none)
    base = ["generate", "--model", "toy", "--prompt", "hello", "--seed", "1", "--max-tokens", "5"]
    default, raw, chat = paceline(*base), paceline(*base, "--raw"), paceline(*base, "--chat")
    assert default.stdout == raw.stdout
    assert default.stderr.startswith("paceline: note: toy has no chat template")
    assert raw.stderr == ""
    assert chat.exit_code == 2
    assert "no chat template" in error_line(chat)
    assert paceline("chat", "--model", "toy", stdin="hello\n").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1"], "temperature = -1.0"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-p", "0"], "top_p = 0.0"),
        (["--max-tokens", "0"], "max_tokens = 0"),
        (["--max-tokens", "many"], "'many' is not a whole number"),
        (["--seed", "-1"], "seed = -1"),
        (["--stop", ""], "stop"),
        (["--verification", "magic"], "verification = 'magic'"),
        (["--draft-length", "-1"], "draft_length = -1"),
        (["--logit-bias", "5"], "--logit-bias '5' is not ID=BIAS"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "names token 5 twice"),
        (["--logit-bias", "5=1000"], "logit_bias[5] = 1000"),
        (["--stop-token-ids", "1,x"], "--stop-token-ids '1,x': give token ids, such as 42 or 42,43"),
        (["--logit-bias", "9999=1"], "9999"),
        (["--drafter", "lokup"], "did you mean lookup?"),
        (["--backend", "tpu"], "backend = 'tpu'"),
        (["--backend", "llamacpp"], "cannot run model 'toy'"),
        (["--threads", "2"], "--threads 2 is not an option of a toy model"),
        (["--dtype", "float32"], "dtype = 'float32' is not an option of backend 'toy'"),
        (["--device", "cpu"], "device = 'cpu' is not an option of backend 'toy'"),
        (["--compile"], "compile = True is not an option of backend 'toy'"),
        (["--page-size", "0"], "--page-size"),
        (["--max-len", "0"], "--max-len"),
        (["--max-len", "10"], "tokens"),
        (["--format", "yaml"], "yaml"),
        (["--min-tokens", "9", "--max-tokens", "8"], "min_tokens = 9"),
        (["--n", "0"], "n = 0"),
        (["--logprobs", "-2"], "logprobs = -2"),
        (["--prompt-logprobs", "-2"], "prompt_logprobs = -2"),
        (["--logprobs-mode", "raw"], "logprobs_mode = 'raw'"),
        (["--bad-words", ""], "bad_words[0] = ''"),
        (["--allowed-token-ids", "9999"], "9999"),
        (["extra"], "extra"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    result = paceline("generate", "--model", "toy", "--prompt", "the cat sat on the mat", *arguments)
    assert result.exit_code == 2
    assert said in error_line(result)
    assert result.stdout == ""


def test_parsers() -> None:
    assert parse_bias(["1=2", "3=-0.5"]) == {1: 2.0, 3: -0.5}
    assert (parse_max_tokens("12"), parse_max_tokens("none")) == (12, NO_LIMIT)
