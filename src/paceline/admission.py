"""What may enter the engine: requests from callers and proposals from drafters.

Everything else is a typed error that says why not.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, Literal

from .errors import DrafterError, InvalidParams, InvalidPrompt, PacelineError, shown
from .params import SamplingParams
from .rng import derive_seed, fresh_seed
from .sampling import CompiledGrammar, GrammarCompiler, History, Softmax, bad_word_sequences, cloned
from .sequence import Group, Sequence
from .text import TextStream
from .types import NOTHING, Backend, BackendInfo, Distribution, IntArray, Proposal, Request, Tokenizer

Q_TOLERANCE = 1e-6
"""How far a row of q may be from summing to 1; the law is exact up to that."""


def admit_request(
    backend: Backend,
    grammars: GrammarCompiler,
    first_id: int,
    prompt_ids: Seq[int],
    params: SamplingParams,
    prompt: str | None = None,
    grammar: CompiledGrammar | None = None,
) -> list[Sequence]:
    """A sequence for each of the n samples. Raises UnsupportedOption, InvalidPrompt or InvalidParams.

    grammar: that of params, where it was compiled before.
    """
    info, tokenizer = backend.info, backend.tokenizer
    if params.stop_strings:
        tokenizer.encode("")  # a model without text would never find them; says so
    _check_params(params, info)
    _refuse_control_texts(params, tokenizer)
    bad_words = bad_word_sequences(params.bad_words or (), tokenizer)
    if grammar is None and params.grammar is not None:
        grammar = grammars.compile(params.grammar)
    ids = _checked_prompt(prompt_ids, info)
    end_ids = frozenset(params.stop_token_ids or ())
    if not params.ignore_eos:
        end_ids |= info.stop_ids
    if params.grammar_after in end_ids:
        raise InvalidParams(f"grammar_after = {params.grammar_after}; allowed: a token that does not end the request")
    group = Group(prompt)
    seed = fresh_seed() if params.seed is None else params.seed
    for index in range(params.n):
        request = Request(
            request_id=first_id + index,
            prompt_ids=ids,
            params=params,
            seed=derive_seed(seed, index),
            verification=resolve_verification(params),
            index=index,
        )
        tokens = list(ids)
        one = Sequence(
            request=request,
            limit=_limit(params, ids, info),
            end_ids=end_ids,
            stream=TextStream(
                tokenizer.token_bytes, params.stop_strings, params.include_stop_str_in_output, params.min_tokens
            ),
            tokens=tokens,
            history=History(
                params,
                tokens,
                len(ids),
                info.vocab_size,
                end_ids=end_ids,
                bad_words=bad_words,
                grammar=grammar.start(end_ids, params.grammar_after) if grammar is not None else None,
            ),
            processors=cloned(params.logits_processors or ()),
            token_bytes=tokenizer.token_bytes,
            group=group,
        )
        group.members.append(one)
    return group.members


def _limit(params: SamplingParams, ids: tuple[int, ...], info: BackendInfo) -> int:
    """Most tokens that prompt and output may have."""
    limit = info.max_len if params.max_tokens is None else min(info.max_len, len(ids) + params.max_tokens)
    if limit > info.kv_tokens:
        raise InvalidPrompt(
            f"a prompt of {len(ids)} tokens with max_tokens = {params.max_tokens} needs room for {limit} tokens; "
            f"{info.model} was opened with room for {info.kv_tokens}"
        )
    if limit - len(ids) < params.min_tokens:
        raise InvalidPrompt(
            f"behind a prompt of {len(ids)} tokens {info.model} has room for {limit - len(ids)} "
            f"(max_len = {info.max_len}), but min_tokens = {params.min_tokens}"
        )
    return limit


def resolve_verification(params: SamplingParams) -> Literal["rejection", "block", "coupled"]:
    """The rule for *sampled* proposals: with a seed the text must not depend on load, else most tokens per step."""
    if params.verification == "auto":
        return "block" if params.seed is None else "coupled"
    return params.verification


def admit_proposal(
    answer: Proposal | PacelineError, who: str, budget: int, vocab_size: int, sequence: Sequence
) -> Proposal:
    """A drafter's answer, cut behind the first draft that is illegal or ends the sample: nothing after it is emitted.

    Cutting there is exact: whether a draft is verified depends on the drafts before it only. Raises the
    answer itself if it is an error, DrafterError where it breaks the contract.
    """
    if isinstance(answer, PacelineError):
        raise answer
    if not isinstance(answer, Proposal):
        raise DrafterError(f"{who}: {answer!r} where a Proposal was asked for")
    if not answer.tokens:
        return NOTHING
    fault = None
    if len(answer) > budget:
        fault = f"{len(answer)} drafts where at most {budget} were asked for"
    elif not answer.is_chain:
        fault = f"a tree with parents {answer.parents}; only chains are verified"
    elif any(type(t) is not int or not 0 <= t < vocab_size for t in answer.tokens):
        fault = f"draft tokens {answer.tokens}; token ids are integers from 0 to {vocab_size - 1}"
    elif not _are_sources(answer.sources):
        fault = f"sources = {shown(answer.sources)}; allowed: a tuple of (name, number of drafts)"
    sampled = answer.kind == "sampled" and sequence.request.verification != "coupled"
    if fault is None and sampled:  # coupled asks nothing of q
        fault = _q_fault(answer)
    if fault is not None:
        raise DrafterError(f"{who}: {fault}")
    return answer.first(sequence.num_useful(answer.tokens, sampled=sampled))


def _are_sources(sources: Any) -> bool:
    return type(sources) is tuple and all(
        type(one) is tuple and len(one) == 2 and type(one[0]) is str and type(one[1]) is int and one[1] >= 0
        for one in sources
    )


def _q_fault(proposal: Proposal) -> str | None:
    """What is wrong with the rows of q that a chain uses; a rule divides by them and trusts them."""
    if proposal.q is None or len(proposal.q) < len(proposal):
        return f"{0 if proposal.q is None else len(proposal.q)} rows of q for {len(proposal)} drafts"
    for i in range(len(proposal)):
        row = Distribution.of(proposal.q[i])
        if isinstance(row, Softmax):
            continue  # it is one by construction, and need not be made whole to see that
        ids = row.ids
        size = row.vocab_size if ids is None else ids.size
        if row.probs.shape != (size,) or (ids is not None and not _ascend(ids, row.vocab_size)):
            return f"q[{i}] with {row.probs.shape} probabilities for a vocabulary of {row.vocab_size}"
        if not (row.probs.min() >= 0.0 and abs(row.probs.sum() - 1.0) <= Q_TOLERANCE):
            return f"q[{i}] sums to {row.probs.sum()} and is at least {row.probs.min()}; it is no distribution"
    return None


def _ascend(ids: IntArray, vocab_size: int) -> bool:
    return ids.size > 0 and ids[0] >= 0 and ids[-1] < vocab_size and bool((ids[1:] > ids[:-1]).all())


def _checked_prompt(prompt_ids: Seq[int], info: BackendInfo) -> tuple[int, ...]:
    ids = []
    if not hasattr(prompt_ids, "__iter__"):
        raise InvalidPrompt(f"prompt = {shown(prompt_ids)}; allowed: a list of token ids")
    for i, token in enumerate(prompt_ids):
        try:
            number = -1 if isinstance(token, bool) else operator.index(token)
        except TypeError:
            number = -1
        if not 0 <= number < info.vocab_size:
            raise InvalidPrompt(
                f"prompt token {i} is {shown(token)}; token ids of {info.model} are 0 to {info.vocab_size - 1}"
            )
        ids.append(number)
    if not ids:
        raise InvalidPrompt("the prompt has no tokens; give at least one")
    if len(ids) >= info.max_len:
        raise InvalidPrompt(
            f"the prompt has {len(ids)} tokens; {info.model} holds {info.max_len} with the output "
            f"(max_len), so a prompt may have at most {info.max_len - 1}"
        )
    return tuple(ids)


def _check_params(params: SamplingParams, info: BackendInfo) -> None:
    named: list[tuple[str, Iterable[int]]] = [
        ("stop_token_ids", params.stop_token_ids or ()),
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("grammar_after", (params.grammar_after,) if isinstance(params.grammar_after, int) else ()),
    ]
    for i, word in enumerate(params.bad_words or ()):
        named.append((f"bad_words[{i}]", () if isinstance(word, str) else word))
    for name, ids in named:
        for token in ids:
            if token >= info.vocab_size:
                raise InvalidParams(
                    f"{name} names token {token}; token ids of {info.model} are 0 to {info.vocab_size - 1}"
                )


def _refuse_control_texts(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """A text that is a control token's name is never found in an output: such tokens add no text to it."""
    named = [(f"bad_words[{i}]", word, "bad_words=[[{}]]") for i, word in enumerate(params.bad_words or ())]
    named += [("stop", text, "stop_token_ids=[{}]") for text in params.stop_strings]
    if params.grammar_after is not None:
        named.append(("grammar_after", params.grammar_after, "grammar_after={}"))  # type: ignore[arg-type]
    for name, text, instead in named:
        token = _control_token(text, tokenizer) if isinstance(text, str) else None
        if token is not None:
            raise InvalidParams(
                f"{name} = {text!r} is a control token (id {token}) and adds no text; use {instead.format(token)}"
            )


def _control_token(text: str, tokenizer: Tokenizer) -> int | None:
    """The id of the token without bytes that is called `text`."""
    try:
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
    except PacelineError:
        return None  # said elsewhere, by whoever needs the text's tokens
    one = ids[0] if len(ids) == 1 else None
    if one is None or tokenizer.token_bytes(one) or tokenizer.token_text(one) != text.encode():
        return None
    return one
