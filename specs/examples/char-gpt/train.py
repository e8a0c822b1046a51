"""A character-level GPT on the prose that ships with Python: one file, one CPU core, nothing to download.

    python train.py --steps 32 --seed 1

ATTENTION=softmax (the default) writes causal attention out, ATTENTION=sdpa calls the fused one: the same formula in
another order of operations. OMP_NUM_THREADS sets the threads, and with them the order in which sums are taken.
"""

import argparse
import math
import os
import resource
import time
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn


def softmax_attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def fused_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION = {"softmax": softmax_attention, "sdpa": fused_attention}


class Block(nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # [batch, length, width]
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, sequence_length, layers, width, heads, attention):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence_length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, targets):  # both [batch, length]; returns the mean loss in nats
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        logits = self.head(self.norm(self.blocks(x)))
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return losses.double().mean()  # a mean in fp32 would round away what small changes do


def load_text():
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


def sample(data, batch, length, generator):
    starts = torch.randint(len(data) - length, (batch,), generator=generator).tolist()
    tokens = torch.stack([data[start : start + length + 1] for start in starts])
    return tokens[:, :-1], tokens[:, 1:]


def train(
    steps=32,
    seed=1,
    layers=2,
    width=64,
    heads=4,
    sequence_length=128,
    micro_batch_size=8,
    accumulation=8,
    learning_rate=3e-3,
    dtype="fp32",
):
    torch.manual_seed(seed)
    batches = torch.Generator().manual_seed(seed)
    data, vocabulary = load_text()
    attention = ATTENTION[os.environ.get("ATTENTION", "softmax")]
    model = GPT(vocabulary, sequence_length, layers, width, heads, attention)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled={"fp32": False, "bf16": True}[dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / steps)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters, {torch.get_num_threads()} threads")

    for step in range(1, steps + 1):
        start, total = time.perf_counter(), 0.0
        for _ in range(accumulation):
            with autocast:
                loss = model(*sample(data, micro_batch_size, sequence_length, batches))
            (loss / accumulation).backward()
            total += loss.item() / accumulation
        norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).double().norm().item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        seconds = time.perf_counter() - start
        speed = accumulation * micro_batch_size * sequence_length / seconds
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"step {step}/{steps} loss={total!r} grad_norm={norm!r}"  # all digits: the floor is near 1e-8
            f" step_time={seconds:.6f} tokens_per_second={speed:.1f} peak_memory_gib={memory:.4f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
