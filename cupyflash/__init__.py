"""cupyflash: exact, IO-aware attention for any DLPack array."""

__version__ = "0.1.0"
