"""Paceline: lossless speculative decoding."""
