"""For tests of rlctl and of what is built on it: a fake engine, an in-process fleet, a local fleet of processes.

Everything here says that it is fake. Nothing of it is imported by the product but through the entry point ``fake``.
"""
