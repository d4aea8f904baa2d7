"""Any GGUF model through llama.cpp: many sequences in one context, packed ragged batches, real rollback.

gguf.py reads the head of a file and refuses broken ones. native.py loads llama.cpp and owns a model with its
context. tokenizer.py is text to tokens and back. cells.py counts KV cells. threads.py counts cores.
backend.py puts them together as the Backend. quantize.py converts files, in a process of its own.

Importing this package loads no llama_cpp; building a LlamaCppBackend does.
"""

from .backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]
