"""Whose tokens sit in which pages. Integers only: tensors belong to the backends."""

from .pages import PageBook

__all__ = ["PageBook"]
