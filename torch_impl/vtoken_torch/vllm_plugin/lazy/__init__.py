"""Lazy mode (paper §3.3): deaths only mark, attention skips dead slots by live words, evacuation gives blocks back."""
