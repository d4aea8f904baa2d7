"""Every exception Paceline raises on purpose.

    PacelineError
    ├── InvalidInput (ValueError)        the caller's values cannot mean anything
    │   ├── InvalidParams                a field of SamplingParams or an option of LLM
    │   ├── InvalidPrompt                empty, longer than the context, token id out of range
    │   └── InvalidDistribution          not a probability vector, shapes that differ, token outside it
    ├── UnsupportedOption (ValueError)   a valid option that this build or this model does not honour
    ├── ModelError                       a model file or name
    │   ├── ModelNotFound                no such file or name
    │   ├── ModelFormatError             not a GGUF, truncated, no vocabulary
    │   ├── ModelDownloadError           download, checksum or conversion failed
    │   └── VocabularyMismatch           the drafter's vocabulary is not the target's
    ├── BackendError                     a forward, a rollback or a slot operation failed
    │   └── RollbackError                truncate() did not leave the slot as asked
    ├── BadLogits                        NaN, +inf, or no finite entry in a row; names request and position
    │   └── NoLegalToken                 the model was fine, but grammar, masks and processors left no token
    ├── ProcessorError                   a logits processor raised, or returned something else than a row
    ├── DrafterError                     a proposal that breaks the drafter contract
    ├── EngineError                      an AsyncEngine that does not take, or does not finish, a request
    │   ├── EngineFull                   as many requests are in flight as may be; try again later
    │   ├── EngineClosed                 close() was called
    │   └── EngineDead                   it broke down for good; open a new one
    └── InvariantError                   Paceline's own books do not balance; always a bug here

Messages name the thing, repeat the caller's value and say what to do.
"""

from __future__ import annotations

MAX_SHOWN = 400  # characters of a value in a message


def shown(value: object) -> str:
    """A caller's value as messages repeat it: its repr, shortened, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # too deep, too many digits, or a __repr__ that fails
        return f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 4 :]}"


class PacelineError(Exception):
    """Root of every exception raised on purpose by Paceline."""


class InvalidInput(PacelineError, ValueError):
    """The caller's values cannot mean anything."""


class InvalidParams(InvalidInput):
    """A field of SamplingParams, or an option of LLM, is outside its range."""


class InvalidPrompt(InvalidInput):
    """A prompt that is empty, longer than the context, or holds a token id out of range."""


class InvalidDistribution(InvalidInput):
    """Not a probability vector, shapes that differ, or a token index outside it."""


class UnsupportedOption(PacelineError, ValueError):
    """A valid option that this build or this model does not honour; never ignored, always refused."""


class ModelError(PacelineError):
    """Something about a model file or a model name."""


class ModelNotFound(ModelError):
    """No such model file or model name."""


class ModelFormatError(ModelError):
    """The file is not a GGUF, is truncated, or cannot be loaded."""


class ModelDownloadError(ModelError):
    """A download, its checksum, or a conversion failed."""


class VocabularyMismatch(ModelError):
    """The drafter's vocabulary is not the target's."""


class BackendError(PacelineError):
    """A forward pass or a slot operation failed."""


class RollbackError(BackendError):
    """truncate() did not leave the slot at the length that was asked for."""


class BadLogits(PacelineError):
    """A logits row holds NaN or +inf, or has no finite entry."""


class NoLegalToken(BadLogits):
    """Grammar, masks and processors together leave a row without any token that may follow."""


class ProcessorError(PacelineError):
    """A logits processor raised, or returned something that is no row of logits."""


class DrafterError(PacelineError):
    """A drafter returned something its contract forbids."""


class EngineError(PacelineError):
    """An AsyncEngine does not take a request, or does not finish one."""


class EngineFull(EngineError):
    """As many requests are in flight as may be. Passes by itself; a server answers 429 or 503."""


class EngineClosed(EngineError):
    """close() was called before the request was over, or before it was made."""


class EngineDead(EngineError):
    """The engine broke down and cannot go on; a new one must be opened."""


class InvariantError(PacelineError):
    """Paceline's own books do not balance. Always a bug in Paceline."""
