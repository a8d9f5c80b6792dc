"""Tokens on disk: preparing them from text, reading them, and the order in which a run reads them."""
