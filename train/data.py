"""Sequences of a corpus by number: the same for any number of ranks and after any resume.

Takes a Corpus, gives batches of token ids (B, T) and their targets (B, T). Sequence i covers tokens
i*T to i*T + T, the last one only as a target. Files are read, not mapped: mapped pages would count as
memory of the process.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from train.corpus import TOKEN_BYTES, TOKENS_FILE, Corpus

_DTYPE = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32}


class Sequences:
    """Training and held-out sequences of one corpus."""

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.num_train = (corpus.train_tokens - 1) // seq_len
        self.num_eval = (corpus.eval_tokens - 1) // seq_len
        self._file = os.open(Path(corpus.folder) / TOKENS_FILE, os.O_RDONLY)
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def close(self) -> None:
        """Close the file of tokens."""
        os.close(self._file)

    def train(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """`count` sequences from position `first` of an endless, shuffled stream; inputs and targets (B, T)."""
        return self._batch([self._train_offset(i) for i in range(first, first + count)])

    def held_out(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """`count` held-out sequences, in file order; inputs and targets (B, T)."""
        begin = self.corpus.train_tokens
        return self._batch([begin + i * self.seq_len for i in range(first, first + count)])

    def _train_offset(self, position: int) -> int:
        epoch, index = divmod(position, self.num_train)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.num_train, generator=generator)
            self._epoch = epoch
        return int(self._order[index]) * self.seq_len

    def _batch(self, offsets: list[int]) -> tuple[Tensor, Tensor]:
        width = TOKEN_BYTES[self.corpus.token_dtype]
        rows = []
        for offset in offsets:
            raw = os.pread(self._file, (self.seq_len + 1) * width, offset * width)
            rows.append(torch.frombuffer(bytearray(raw), dtype=_DTYPE[self.corpus.token_dtype]).long())
        tokens = torch.stack(rows)  # (B, T + 1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
