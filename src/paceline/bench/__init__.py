"""Measuring: how fast a configuration is, against which other, and where the time goes.

prompts.py reads what is asked. runs.py has the nouns, and times everybody in turn; target.py are Paceline's own
contenders, peers.py other engines in processes of their own. guard.py waits for an idle machine. cells.py turns runs
into ratios, with intervals.py for their statistics; load.py is traffic of many readers. machine.py says what it ran on;
report.py, tables.py and svg.py show it.
"""
