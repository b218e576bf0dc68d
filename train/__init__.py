"""The trainer: FSDP2 training of decoder-only transformers; runs without an orchestrator."""
