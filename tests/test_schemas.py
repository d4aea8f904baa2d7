"""Real JSON schemas on SmolLM2: what comes out validates, drafting changes no text, what is not supported is refused.

Equality is asked for under the conditions of test_real_model.py: a quantised model, one thread, small steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, RequestOutput, SamplingParams
from paceline.errors import UnsupportedOption
from paceline.llm import open_backend
from paceline.types import Backend

from .test_real_model import BIT_STABLE, rows_are_bit_stable

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.model

# schema -> what llguidance 1.9 lacks of it, as its refusal names it
REFUSED = {
    "schemastore-aws-cdk-appconfig-featureflags-1.0.0": '"not"',
    "schemastore-bosh-deploy-config": "format: regex",
    "schemastore-claude-code-launch": '"dependencies"',
    "schemastore-drupal-info": '"if", "then"',
    "schemastore-enonic-xp-api-8.0.0": '"uniqueItems"',
    "schemastore-enonic-xp-site-8.0.0": '"not"',
    "schemastore-gaspar-3.0": '"if", "then"',
    "schemastore-libman": '"not"',
    "schemastore-popxf-corr-1.0": '"uniqueItems"',
    "schemastore-winget-pkgs-locale-1.0.0": '"uniqueItems"',
}
COMPILED = (
    "iglu-datamodeling-config-1-0-0",
    "iglu-ecommerce-cart-1-0-0",
    "iglu-ecommerce-refund-1-0-0",
    "iglu-enrichments-sql_query_enrichment_config-1-0-0",
    "iglu-factotum-job_update-1-0-0",
    "iglu-iglu-resolver-config-1-0-0",
    "iglu-snowplow-product_event-1-0-0",
    "iglu-snowplow-promotion_event-1-0-0",
    "schemastore-elm",
    "schemastore-minecraft-dimension-type",
)
FEW = ("iglu-ecommerce-cart-1-0-0", "iglu-snowplow-promotion_event-1-0-0")
DRAFTERS = ("none", "lookup", "forced", "forced+lookup")


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    root = os.environ.get("PACELINE_DATA")
    folder = Path(root or ".") / "jsonschemas"
    if not root or not folder.is_dir():
        pytest.skip("PACELINE_DATA is not set to a folder with jsonschemas/*.json")
    files = [f for f in sorted(folder.glob("*.json")) if f.name != "index.json"]
    return {f.name.removesuffix(".json"): json.loads(f.read_text(encoding="utf-8")) for f in files}


@pytest.fixture(scope="module")
def backend(model_path: Callable[[str], Path]) -> Iterator[Backend]:
    opened = open_backend(model_path("smollm2:q4_0"), **BIT_STABLE)
    yield opened
    opened.close()  # type: ignore[attr-defined]


def ask(llm: LLM, name: str, schema: Any, temperature: float, max_tokens: int) -> RequestOutput:
    """One document, asked for by the schema's own words, with options that keep so small a model from rambling."""
    names = ", ".join(list(schema.get("properties", {}))[:8])
    what = schema.get("description") or schema.get("title") or name
    message = f"Write one short JSON document. It is: {str(what)[:200]} It has: {names}."
    params = SamplingParams(
        temperature=temperature,
        seed=sum(name.encode()),
        min_p=0.1,
        repetition_penalty=1.15 if temperature == 0 else 1.1,
        max_tokens=max_tokens,
        grammar={"json_schema": schema, "whitespace": False},
    )
    return llm.chat([{"role": "user", "content": message}], params)[0]


def validate(name: str, schema: Any, out: RequestOutput) -> bool:
    """Whether it finished; then it parses and is valid. Of unknown address: as in draft 7, by their form."""
    completion = out.outputs[0]
    assert completion.error is None, f"{name}: {completion.error}"
    if completion.finish_reason == "length":
        return False
    assert completion.finish_reason == "stop", name
    known = schema if "json-schema.org" in schema["$schema"] else {k: v for k, v in schema.items() if k != "$schema"}
    kind = jsonschema.validators.validator_for(known, default=jsonschema.Draft7Validator)
    kind(known, format_checker=kind.FORMAT_CHECKER).validate(json.loads(completion.text))
    return True


def test_every_schema_is_known(schemas: dict[str, Any]) -> None:
    """A schema that is neither in one list nor in the other would be tested by nobody."""
    assert sorted([*REFUSED, *COMPILED]) == sorted(schemas)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(schemas: dict[str, Any], backend: Backend, name: str) -> None:
    with LLM(backend, drafter="none") as llm, pytest.raises(UnsupportedOption) as caught:
        ask(llm, name, schemas[name], 0.0, 4)
    assert REFUSED[name] in str(caught.value)
    assert "'lenient': True would drop" in str(caught.value)


def test_leniency_is_reported_and_still_writes_json(schemas: dict[str, Any], backend: Backend) -> None:
    name = "schemastore-bosh-deploy-config"
    grammar = {"json_schema": schemas[name], "lenient": True, "whitespace": False}
    with LLM(backend, drafter="forced") as llm, pytest.warns(UserWarning, match="Unknown format: regex"):
        llm.generate("{", SamplingParams(temperature=0, max_tokens=8, grammar=grammar))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("names", "max_tokens"),
    [pytest.param(FEW, 40, id="few"), pytest.param(COMPILED, 220, id="all", marks=pytest.mark.slow)],
)
def test_documents_validate_and_drafting_changes_nothing(
    schemas: dict[str, Any], backend: Backend, names: tuple[str, ...], max_tokens: int, temperature: float
) -> None:
    """llama-cpp-python#1770: odd JSON with lookup and a schema. sglang#31978: one kind of drafter without the mask.

    vllm#27969: drafts of lookup break the grammar all the time, which may cost acceptance and nothing else.
    """
    texts: dict[str, dict[str, str]] = {drafter: {} for drafter in DRAFTERS}
    finished: dict[str, bool] = {}
    print(f"\n| schema, temperature {temperature:g} | tokens | ended | {' | '.join(DRAFTERS)} |  (tokens per step)")
    probe = backend.tokenizer.encode("Write one short JSON document. " * 60)[:301]
    stable = rows_are_bit_stable(backend, probe)
    per_step: dict[str, list[str]] = {name: [] for name in names}
    for drafter in DRAFTERS:
        with LLM(backend, drafter=drafter, draft_length=4) as llm:
            for name in names:
                out = ask(llm, name, schemas[name], temperature, max_tokens)
                finished[name] = validate(name, schemas[name], out)
                texts[drafter][name] = out.outputs[0].text
                per_step[name].append(f"{out.speculation.tokens_per_step:.2f}")
    for name in names:
        length = len(backend.tokenizer.encode(texts["none"][name]))
        print(f"| {name} | {length} | {'stop' if finished[name] else 'length'} | {' | '.join(per_step[name])} |")
    if not stable:
        pytest.skip("rows of width 5 and 1 differ on this machine; equality is not promised")
    for drafter in DRAFTERS[1:]:
        different = [name for name in names if texts[drafter][name] != texts["none"][name]]
        assert different == [], f"{drafter}: {different} differ"
    forced = [float(per_step[name][DRAFTERS.index("forced")]) for name in names]
    assert max(forced) > 1.1, "forced tokens brought nothing"
    if names == COMPILED:
        assert sum(finished.values()) >= 3, "too few documents came to an end to say anything"
