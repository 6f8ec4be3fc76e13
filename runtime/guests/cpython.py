"""CPython 3.12 as a guest: not offered by this version.

Its module (26 MB, in the same wheel as QuickJS) takes eight minutes to register and was moved
within one process only; hops across processes and a base image after its start are open. Python
scripts run on MicroPython.
"""
