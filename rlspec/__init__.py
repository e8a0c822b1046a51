"""rlspec: a declarative validator for the numerics of LLM training and inference."""

__version__ = "0.1.0"
