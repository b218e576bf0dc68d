"""The launcher: composes a config, predicts its memory, refuses or launches it, and keeps the record."""
