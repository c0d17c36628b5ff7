"""The version of pdd.

A test compares it with pyproject.toml: reading package metadata costs more than `pdd status` may.
"""

VERSION = "0.1.0"
