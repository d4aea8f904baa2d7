"""Planning: whether drafting will pay, before it is tried; and how far such a prediction can be trusted.

model.py holds the arithmetic, without a clock or a model. watch.py runs prompts and writes down every step. study.py
puts both together: measure, predict, measure what was predicted. report.py and drawing.py show it.
"""
