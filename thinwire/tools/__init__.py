"""What the tools share: settings, methods by name, records of runs, tables, plots.

Tools (recipes, bench, lab, analyse, the command line) are guests of the library. They use its public names, and the library
never imports them.
"""
