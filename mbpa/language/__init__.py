"""Language models that read documents and can say where each token came from."""

from mbpa.language.memory_lm import MemoryLM, SourceInfo
from mbpa.language.tokens import Generation, Origin, Score, Token

__all__ = ["Generation", "MemoryLM", "Origin", "Score", "SourceInfo", "Token"]
