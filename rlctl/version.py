"""The package's version and the version of the contract that it speaks."""

__version__ = "0.1.0"

CONTRACT_VERSION = 1
"""Grows with every incompatible change of ``protos/``; versions N and N-1 interoperate."""
