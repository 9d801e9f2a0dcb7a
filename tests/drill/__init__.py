"""The fault drill: run the program, hurt it in every way a machine can, run the same command again, compare the end.

`make fault-drill` runs :mod:`drill.__main__`; `test_fault_drill.py` runs a short form of it.
"""
