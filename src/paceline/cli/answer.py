"""A finished answer as the JSON object of `--format json`."""

from __future__ import annotations

from typing import Any

from ..params import SamplingParams
from ..types import CompletionOutput, RequestOutput, SpeculationStats
from .loading import Session
from .logprobs import logprobs_as_json
from .report import STAGES, decode_seconds, error_as_json, tokens_per_second
from .streaming import Answer


def answer_as_json(session: Session, answer: Answer, params: SamplingParams) -> dict[str, Any]:
    """See `paceline generate --help` for its fields. Seconds, tokens, ratios.

    `outputs` has one object for each sample; the fields of the first stand in the answer itself too, where a reader
    that wants no more than one need not look further. usage, speculation, timing: of all samples together.
    """
    output, stats = answer.output, answer.output.speculation
    samples = [sample_as_json(one, params) for one in output.outputs]
    generated = sum(len(one.token_ids) for one in output.outputs)
    result: dict[str, Any] = {
        "model": session.model,
        "drafter": session.drafter,
        "draft_length": _draft_length(session, params),
        "verification": output.outputs[0].verification,
        **{name: value for name, value in samples[0].items() if name != "index"},
        "outputs": samples,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": generated,
            "total_tokens": len(output.prompt_token_ids) + generated,
        },
        "speculation": _speculation(stats),
        "timing": {
            "load_seconds": session.load_seconds,
            "first_text_seconds": answer.first_text_seconds,
            "total_seconds": answer.total_seconds,
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": decode_seconds(stats),
            **{f"{stage}_seconds": getattr(stats, f"{stage}_seconds") for stage in STAGES},
            "tokens_per_second": tokens_per_second(stats),
        },
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = logprobs_as_json(
            output.prompt_logprobs, output.prompt_token_ids, params.prompt_logprobs
        )
    errors = [one["error"] for one in samples if "error" in one]
    if errors:
        result["error"] = errors[0]
    return result


def sample_as_json(sample: CompletionOutput, params: SamplingParams) -> dict[str, Any]:
    """One of `outputs`: logprobs only where they were asked for, error only where there is one."""
    result: dict[str, Any] = {
        "index": sample.index,
        "seed": sample.seed,
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "token_kinds": list(sample.kinds),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        result["logprobs"] = logprobs_as_json(sample.logprobs, sample.token_ids, params.logprobs)
    if sample.error is not None:
        result["error"] = error_as_json(sample.error)
    return result


def notes_on(output: RequestOutput, params: SamplingParams) -> list[str]:
    """What the reader of an answer with a grammar should know, though nothing failed: it is cut, or never began."""
    notes = []
    for one in output.outputs if params.grammar is not None else ():
        who = "" if len(output.outputs) == 1 else f"sample {one.index}: "
        after = params.grammar_after
        came = after is None or (after in one.text if isinstance(after, str) else after in one.token_ids)
        if not came and one.error is None:
            notes.append(f"{who}the grammar never started: {after!r} did not come")
        if one.finish_reason == "length":
            notes.append(f"{who}{cut_at(one, params)}")
    return notes


def cut_at(sample: CompletionOutput, params: SamplingParams) -> str:
    """What cut a sample that had not come to its end."""
    return f"the answer was cut at {'--max-tokens' if len(sample.token_ids) == params.max_tokens else '--max-len'}"


def _speculation(stats: SpeculationStats) -> dict[str, Any]:
    return {
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "rejected": stats.rejected,
        "emitted": stats.emitted,
        "drafted_at": stats.drafted_at,
        "accepted_at": stats.accepted_at,
        "tokens_per_step": stats.tokens_per_step,
        "acceptance_rate": stats.acceptance_rate,
    }


def _draft_length(session: Session, params: SamplingParams) -> int | None:
    """Drafts per step where that is fixed; None where the engine decides."""
    engine = session.llm.engine
    if params.draft_length is not None:
        return params.draft_length
    return None if engine.is_adaptive else engine.draft_length
